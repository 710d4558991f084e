"""Generative models, structured like Keras's examples.

Each has its own `train_step`, which draws random numbers. Batches contain
inputs only. No program refers to a strategy. The last batch has 14 rows.
"""

import keras
import numpy as np
import tensorflow as tf

from tests.programs import common

layers, losses, ops = keras.layers, keras.losses, keras.ops
_ROWS = 78  # Two batches of 32, and one of 14.


def _images():
  return np.random.default_rng(12).random((_ROWS, 8, 8, 1)).astype('f4')


class _Sampling(layers.Layer):
  """Draws a point in the latent space."""

  def __init__(self):
    super().__init__()
    self.seed_generator = keras.random.SeedGenerator(1337)

  def call(self, inputs):
    mean, log_variance = inputs
    batch, size = ops.shape(mean)
    noise = keras.random.normal([batch, size], seed=self.seed_generator)
    return mean + ops.exp(0.5 * log_variance) * noise


class _Autoencoder(keras.Model):
  """The VAE from Keras's examples."""

  def __init__(self):
    super().__init__(name='autoencoder')
    inputs = layers.Input([8, 8, 1])
    hidden = layers.Conv2D(4, 3, 2, padding='same', activation='relu')(inputs)
    hidden = layers.Dense(8, 'relu')(layers.Flatten()(hidden))
    found = [layers.Dense(2)(hidden), layers.Dense(2)(hidden)]
    self.encoder = keras.Model(inputs, [*found, _Sampling()(found)])
    self.decoder = keras.Sequential(
      [
        layers.Input([2]),
        layers.Dense(4 * 4 * 4, 'relu'),
        layers.Reshape([4, 4, 4]),
        layers.Conv2DTranspose(1, 3, 2, padding='same', activation='sigmoid'),
      ]
    )
    names = ('loss', 'reconstruction_loss', 'kl_loss')
    self.trackers = [keras.metrics.Mean(name=n) for n in names]

  @property
  def metrics(self):
    return self.trackers

  def call(self, data):
    return self.decoder(self.encoder(data)[2])

  def train_step(self, data):
    with tf.GradientTape() as tape:
      mean, log_variance, z = self.encoder(data)
      wrong = losses.binary_crossentropy(data, self.decoder(z))
      wrong = ops.mean(ops.sum(wrong, axis=(1, 2)))
      divergence = -0.5 * (
        1 + log_variance - ops.square(mean) - ops.exp(log_variance)
      )
      divergence = ops.mean(ops.sum(divergence, axis=1))
      loss = wrong + divergence
    common.descend(self.optimizer, tape, loss, self.trainable_weights)
    for tracker, value in zip(
      self.trackers, (loss, wrong, divergence), strict=True
    ):
      tracker.update_state(value)
    return {m.name: m.result() for m in self.metrics}


def _vae():
  model = _Autoencoder()
  model.compile(keras.optimizers.Adam())
  x = _images()
  found = common.fitted(model, common.batches(x))
  return found, model.predict(x, batch_size=32, verbose=0)


class _Quantizer(layers.Layer):
  """Replaces each vector by the nearest codebook vector, with a
  straight-through gradient.
  """

  def __init__(self, count, size):
    super().__init__()
    self.count, self.size = count, size

  def build(self, shape):
    self.vectors = self.add_weight(
      shape=[self.size, self.count], initializer='random_uniform'
    )

  def call(self, x):
    flat = ops.reshape(x, [-1, self.size])
    distances = (
      ops.sum(flat**2, axis=1, keepdims=True)
      + ops.sum(self.vectors**2, axis=0)
      - 2 * ops.matmul(flat, self.vectors)
    )
    nearest = ops.one_hot(ops.argmin(distances, axis=1), self.count)
    found = ops.matmul(nearest, ops.transpose(self.vectors))
    found = ops.reshape(found, ops.shape(x))
    self.add_loss(
      0.25 * ops.mean((ops.stop_gradient(found) - x) ** 2)
      + ops.mean((found - ops.stop_gradient(x)) ** 2)
    )
    return x + ops.stop_gradient(found - x)


class _QuantizedAutoencoder(keras.Model):
  """The VQ-VAE from Keras's examples."""

  def __init__(self):
    super().__init__(name='quantized')
    self.variance = 0.08
    self.net = keras.Sequential(
      [
        layers.Input([8, 8, 1]),
        layers.Conv2D(4, 3, 2, padding='same', activation='relu'),
        layers.Conv2D(2, 1, padding='same'),
        _Quantizer(8, 2),
        layers.Conv2DTranspose(4, 3, 2, padding='same', activation='relu'),
        layers.Conv2DTranspose(1, 3, padding='same'),
      ]
    )
    self.total = keras.metrics.Mean(name='loss')
    self.quantized = keras.metrics.Mean(name='vqvae_loss')

  def call(self, x):
    return self.net(x)

  def train_step(self, x):
    with tf.GradientTape() as tape:
      wrong = ops.mean((x - self.net(x)) ** 2) / self.variance
      loss = wrong + sum(self.net.losses)
    gradients = tape.gradient(loss, self.net.trainable_variables)
    self.optimizer.apply(gradients, self.net.trainable_variables)
    self.total.update_state(loss)
    self.quantized.update_state(sum(self.net.losses))
    return {m.name: m.result() for m in (self.total, self.quantized)}


def _vq_vae():
  model = _QuantizedAutoencoder()
  model.compile(keras.optimizers.Adam(1e-2))
  return common.fitted(model, common.batches(_images()))


class _Wasserstein(keras.Model):
  """The WGAN-GP from Keras's examples: several critic steps, then one generator
  step.
  """

  def __init__(self):
    super().__init__(name='wasserstein')
    self.critic = keras.Sequential(
      [
        layers.Input([8, 8, 1]),
        layers.Conv2D(4, 3, 2, padding='same'),
        layers.LeakyReLU(0.2),
        layers.Dropout(0.3),
        layers.Flatten(),
        # This bias would have a zero gradient. Adam would amplify its rounding
        # errors.
        layers.Dense(1, use_bias=False),
      ]
    )
    self.maker = keras.Sequential(
      [
        layers.Input([4]),
        layers.Dense(4 * 4 * 2, use_bias=False),
        layers.BatchNormalization(),
        layers.LeakyReLU(0.2),
        layers.Reshape([4, 4, 2]),
        layers.UpSampling2D(2),
        layers.Conv2D(1, 3, padding='same', activation='sigmoid'),
      ]
    )
    self.turns = 2
    self.noise = keras.random.SeedGenerator(3)

  def compile(self, critic_optimizer, maker_optimizer):
    super().compile()
    self.critic_optimizer = critic_optimizer
    self.maker_optimizer = maker_optimizer

  def gradient_penalty(self, batch_size, real, fake):
    alpha = keras.random.uniform([batch_size, 1, 1, 1], seed=self.noise)
    between = real + alpha * (fake - real)
    with tf.GradientTape() as tape:
      tape.watch(between)
      found = self.critic(between, training=True)
    slopes = tape.gradient(found, [between])[0]
    norm = ops.sqrt(ops.sum(ops.square(slopes), axis=[1, 2, 3]))
    return ops.mean((norm - 1.0) ** 2)

  def train_step(self, real):
    batch_size = tf.shape(real)[0]
    for _ in range(self.turns):
      noise = keras.random.normal([batch_size, 4], seed=self.noise)
      with tf.GradientTape() as tape:
        fake = self.maker(noise, training=True)
        loss = ops.mean(self.critic(fake, training=True))
        loss -= ops.mean(self.critic(real, training=True))
        loss += 10.0 * self.gradient_penalty(batch_size, real, fake)
      weights = self.critic.trainable_variables
      common.descend(self.critic_optimizer, tape, loss, weights)
    noise = tf.random.stateless_normal([batch_size, 4], seed=[1, 2])
    with tf.GradientTape() as tape:
      fake = self.critic(self.maker(noise, training=True), training=True)
      maker_loss = -ops.mean(fake)
    weights = self.maker.trainable_variables
    common.descend(self.maker_optimizer, tape, maker_loss, weights)
    return {'d_loss': loss, 'g_loss': maker_loss}


def _wgan_gp():
  model = _Wasserstein()
  model.compile(
    *(keras.optimizers.Adam(2e-3, beta_1=0.5, beta_2=0.9) for _ in range(2))
  )
  return common.fitted(model, common.batches(_images()))


class _Diffusion(keras.Model):
  """The DDIM from Keras's examples: the model predicts noise of random strength."""

  def __init__(self):
    super().__init__(name='diffusion')
    self.normalizer = layers.Normalization()
    self.network = self._network()
    self.ema_network = keras.models.clone_model(self.network)
    self.seed_generator = keras.random.SeedGenerator(4)
    self.noise_loss = keras.metrics.Mean(name='n_loss')
    self.image_loss = keras.metrics.Mean(name='i_loss')

  def _network(self):
    images, variances = layers.Input([8, 8, 1]), layers.Input([1, 1, 1])
    waves = ops.concatenate([ops.sin(variances), ops.cos(variances)], -1)
    hidden = layers.Concatenate()([images, layers.UpSampling2D(8)(waves)])
    hidden = layers.Conv2D(4, 3, padding='same', use_bias=False)(hidden)
    hidden = layers.BatchNormalization(center=False, scale=False)(hidden)
    hidden = layers.Activation('swish')(hidden)
    outputs = layers.Conv2D(1, 1, kernel_initializer='zeros')(hidden)
    return keras.Model([images, variances], outputs)

  @property
  def metrics(self):
    return [self.noise_loss, self.image_loss]

  def noisy(self, images):
    images = self.normalizer(images, training=True)
    batch_size = ops.shape(images)[0]
    noises = keras.random.normal(
      [batch_size, 8, 8, 1], seed=self.seed_generator
    )
    times = keras.random.uniform(
      [batch_size, 1, 1, 1], 0.0, 1.0, seed=self.seed_generator
    )
    start, end = ops.arccos(0.95), ops.arccos(0.02)
    angles = ops.cast(start + times * (end - start), 'float32')
    signal, noise = ops.cos(angles), ops.sin(angles)
    return images, noises, signal * images + noise * noises, signal, noise

  def measured(self, noise_loss, denoised, images):
    self.noise_loss.update_state(noise_loss)
    self.image_loss.update_state(self.loss(images, denoised))
    return {m.name: m.result() for m in self.metrics}

  def train_step(self, images):
    images, noises, noisy, signal, noise = self.noisy(images)
    with tf.GradientTape() as tape:
      told = self.network([noisy, noise**2], training=True)
      loss = self.loss(noises, told)
    common.descend(self.optimizer, tape, loss, self.network.trainable_weights)
    found = self.measured(loss, (noisy - noise * told) / signal, images)
    for weight, ema_weight in zip(
      self.network.weights, self.ema_network.weights, strict=True
    ):
      ema_weight.assign(0.9 * ema_weight + (1 - 0.9) * weight)
    return found

  def test_step(self, images):
    images, noises, noisy, signal, noise = self.noisy(images)
    told = self.ema_network([noisy, noise**2], training=False)
    loss = self.loss(noises, told)
    return self.measured(loss, (noisy - noise * told) / signal, images)


def _diffusion():
  images = _images()
  model = _Diffusion()
  model.compile(
    optimizer=keras.optimizers.AdamW(1e-2, weight_decay=1e-4),
    loss=losses.MeanAbsoluteError(),
  )
  model.normalizer.adapt(common.batches(images))
  return common.fitted(
    model, common.batches(images), validation_data=common.batches(images)
  )


PROGRAMS = {
  'vae': _vae,
  'vq_vae': _vq_vae,
  'wgan_gp': _wgan_gp,
  'diffusion': _diffusion,
}
