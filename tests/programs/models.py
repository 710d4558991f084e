"""Models of images, texts and sequences, structured like Keras's examples.

No program refers to a strategy. Each returns the results of `fit`, `evaluate`
and `predict`, and the weights. The last batch has 14 rows.
"""

import keras
import numpy as np
import tensorflow as tf

from tests.programs import common

layers, ops = keras.layers, keras.ops
_ROWS = 78  # Two batches of 32, and one of 14.
_CLASSES = 3
_LENGTH = 6
_WORDS = 12


def _images(size=8):
  """Returns images with values from 0 to 255. The class is the bright region."""
  rng = np.random.default_rng(5)
  x = rng.integers(0, 200, (_ROWS, size, size, 3)).astype('f4')
  y = rng.integers(0, _CLASSES, _ROWS)
  x[np.arange(_ROWS), :, y] += 50.0
  return x, y


def _texts():
  """Returns texts of different lengths, padded with zeros."""
  rng = np.random.default_rng(6)
  texts = rng.integers(1, _WORDS, (_ROWS, _LENGTH))
  lengths = rng.integers(2, _LENGTH + 1, (_ROWS, 1))
  texts[np.arange(_LENGTH) >= lengths] = 0
  return texts, (texts == 3).any(1).astype('i4')


# Images.


def _image_classification():
  x, y = _images()
  augmentation = keras.Sequential(
    [layers.RandomFlip('horizontal'), layers.RandomRotation(0.1)]
  )
  model = keras.Sequential(
    [
      layers.Input([8, 8, 3]),
      augmentation,
      layers.Rescaling(1 / 255),
      layers.Conv2D(4, 3, padding='same', activation='relu'),
      layers.MaxPooling2D(),
      layers.Conv2D(8, 3, padding='same', activation='relu'),
      layers.MaxPooling2D(),
      layers.Dropout(0.2),
      layers.Flatten(),
      layers.Dense(16, 'relu'),
      layers.Dense(_CLASSES),
    ]
  )
  return common.train(model, x, y, metrics=['accuracy'], validation_split=0.2)


def _augmentations():
  """Trains with every augmentation layer that draws random numbers per image."""
  x, y = _images()
  model = keras.Sequential(
    [
      layers.Input([8, 8, 3]),
      layers.RandomTranslation(0.1, 0.1),
      layers.RandomZoom(0.1),
      layers.RandomContrast(0.2),
      layers.RandomBrightness(0.2),
      layers.RandomCrop(6, 6),
      layers.Normalization(mean=128.0, variance=3000.0),
      layers.GaussianNoise(0.1),
      layers.Conv2D(4, 3, activation='relu'),
      layers.GlobalMaxPooling2D(),
      layers.Dense(_CLASSES),
    ]
  )
  return common.train(model, x, y)


def _convolution(x, filters, stride=1, activation='relu'):
  x = layers.Conv2D(filters, 3, stride, padding='same', use_bias=False)(x)
  x = layers.BatchNormalization()(x)
  return layers.Activation(activation)(x)


def _transfer_learning():
  x, y = _images()
  inputs = layers.Input([8, 8, 3])
  base = keras.Model(inputs, _convolution(_convolution(inputs, 4), 8, 2))
  base.trainable = False
  inputs = layers.Input([8, 8, 3])
  scaled = layers.Rescaling(1 / 127.5, offset=-1)(inputs)
  hidden = layers.GlobalAveragePooling2D()(base(scaled, training=False))
  outputs = layers.Dense(_CLASSES)(layers.Dropout(0.2)(hidden))
  model = keras.Model(inputs, outputs)
  options = {'metrics': ['accuracy'], 'epochs': 1}
  first = common.train(model, x, y, **options)
  base.trainable = True
  return first, common.train(
    model, x, y, keras.optimizers.Adam(1e-5), **options
  )


def _resnet():
  x, y = _images()
  inputs = layers.Input([8, 8, 3])
  hidden = _convolution(layers.Rescaling(1 / 255)(inputs), 4)
  for filters, stride in (4, 1), (8, 2):
    short = hidden
    if stride > 1:
      short = layers.Conv2D(filters, 1, stride, use_bias=False)(hidden)
      short = layers.BatchNormalization()(short)
    hidden = _convolution(hidden, filters, stride)
    hidden = _convolution(hidden, filters, activation='linear')
    hidden = layers.ReLU()(layers.Add()([hidden, short]))
  outputs = layers.Dense(_CLASSES)(layers.GlobalAveragePooling2D()(hidden))
  model = keras.Model(inputs, outputs)
  rate = keras.optimizers.schedules.CosineDecay(0.05, 6)
  optimizer = keras.optimizers.SGD(rate, momentum=0.9, nesterov=True)
  return common.train(model, x, y, optimizer, metrics=['accuracy'])


def _application(build, **options):
  """Returns a program that trains a whole network in float64.

  The images are small, so the last layers see a single pixel. Their
  normalization amplifies rounding errors.
  """

  def program():
    x, y = _images(32)
    keras.config.set_floatx('float64')
    keras.config.set_dtype_policy('float64')
    model = build(
      input_shape=(32, 32, 3),
      weights=None,
      classes=_CLASSES,
      classifier_activation=None,
      **options,
    )
    assert model.compute_dtype == 'float64'
    optimizer = keras.optimizers.SGD(1e-4, momentum=0.9)
    return common.train(model, x / 127.5 - 1.0, y, optimizer, epochs=1)

  return program


class _ClassToken(layers.Layer):
  """Prepends a learned token to the patches of each image and adds positions."""

  def build(self, shape):
    self.token = self.add_weight(shape=[1, 1, shape[-1]], name='token')
    self.place = layers.Embedding(shape[1] + 1, shape[-1])

  def call(self, patches):
    token = ops.broadcast_to(
      self.token, [ops.shape(patches)[0], 1, patches.shape[-1]]
    )
    joined = ops.concatenate([token, patches], axis=1)
    return joined + self.place(ops.arange(joined.shape[1]))


def _vision_transformer():
  x, y = _images()
  inputs = layers.Input([8, 8, 3])
  patches = ops.image.extract_patches(layers.Rescaling(1 / 255)(inputs), 4)
  patches = layers.Reshape([-1, 48])(patches)
  hidden = _ClassToken()(layers.Dense(8)(patches))
  normal = layers.LayerNormalization(epsilon=1e-6)(hidden)
  attention = layers.MultiHeadAttention(2, 4, dropout=0.1, use_bias=False)
  hidden = layers.Add()([attention(normal, normal), hidden])
  normal = layers.LayerNormalization(epsilon=1e-6)(hidden)
  dense = layers.Dense(8)(layers.Dense(16, 'gelu')(normal))
  hidden = layers.Add()([layers.Dropout(0.1)(dense), hidden])
  hidden = layers.LayerNormalization(epsilon=1e-6)(hidden)[:, 0]
  model = keras.Model(inputs, layers.Dense(_CLASSES)(hidden))
  return common.train(
    model,
    x,
    y,
    keras.optimizers.AdamW(1e-3, weight_decay=1e-4),
    metrics=['accuracy', keras.metrics.SparseTopKCategoricalAccuracy(2)],
  )


def _unet():
  inputs = layers.Input([8, 8, 3])
  down = _convolution(inputs, 4)
  hidden = layers.MaxPooling2D(3, 2, padding='same')(down)
  hidden = layers.SeparableConv2D(8, 3, padding='same')(hidden)
  hidden = layers.Activation('relu')(layers.BatchNormalization()(hidden))
  low = layers.AveragePooling2D(2)(hidden)
  low = layers.Conv2DTranspose(8, 3, 2, padding='same', activation='relu')(low)
  hidden = layers.Concatenate()([hidden, low])
  hidden = layers.UpSampling2D(interpolation='bilinear')(hidden)
  hidden = layers.add([layers.Conv2D(4, 1)(hidden), down])
  up = layers.UpSampling2D(2)(layers.MaxPooling2D()(hidden))
  outputs = layers.Conv2D(2, 3, padding='same', activation='softmax')(
    layers.concatenate([hidden, up])
  )
  model = keras.Model(inputs, outputs)
  x = _images()[0] / 255
  # Whether each pixel is bright.
  y = (x.mean(-1, keepdims=True) > 0.5).astype('u1')
  return common.train(
    model,
    x,
    y,
    keras.optimizers.SGD(0.1),
    'sparse_categorical_crossentropy',
    ['accuracy'],
    validation_data=(x, y),
  )


# Texts.


class _Block(layers.Layer):
  """A transformer block. Keras passes it the mask of the texts."""

  def __init__(self, is_causal=False):
    super().__init__()
    # A key's bias has a gradient of rounding noise, which Adam would amplify.
    self.attention = layers.MultiHeadAttention(
      2, 4, dropout=0.1, use_bias=False
    )
    self.dense = keras.Sequential([layers.Dense(16, 'relu'), layers.Dense(8)])
    self.normal = [layers.LayerNormalization(epsilon=1e-6) for _ in range(2)]
    self.dropout = [layers.Dropout(0.1) for _ in range(2)]
    self.is_causal = is_causal
    self.supports_masking = True

  def causal_mask(self, batch_size, length):
    """Returns the mask that Keras's example makes."""
    mask = ops.arange(length)[:, None] >= ops.arange(length)
    mask = ops.reshape(ops.cast(mask, 'int32'), [1, length, length])
    return tf.tile(mask, tf.stack([batch_size, 1, 1]))

  def call(self, inputs, training=None, mask=None):
    options = {}
    if self.is_causal:
      batch_size, length = ops.shape(inputs)[:2]
      options['attention_mask'] = self.causal_mask(batch_size, length)
    found = self.attention(inputs, inputs, training=training, **options)
    found = self.dropout[0](found, training=training)
    inputs = self.normal[0](inputs + found)
    found = self.dropout[1](self.dense(inputs), training=training)
    return self.normal[1](inputs + found)


def _text_transformer():
  x, y = _texts()
  inputs = layers.Input([_LENGTH], dtype='int32')
  hidden = _Block()(
    common.Positions(_WORDS, _LENGTH, 8, mask_zero=True)(inputs)
  )
  hidden = layers.GlobalAveragePooling1D()(hidden)
  hidden = layers.Dense(8, 'relu')(layers.Dropout(0.1)(hidden))
  model = keras.Model(inputs, layers.Dense(2, 'softmax')(hidden))
  loss = 'sparse_categorical_crossentropy'
  return common.train(model, x, y, loss=loss, metrics=['accuracy'])


def _mini_gpt():
  rng = np.random.default_rng(7)
  dataset = common.batches(rng.integers(1, _WORDS, (_ROWS, _LENGTH + 1)))
  dataset = dataset.map(lambda text: (text[:, :-1], text[:, 1:])).prefetch(1)
  inputs = layers.Input([_LENGTH], dtype='int32')
  hidden = _Block(is_causal=True)(common.Positions(_WORDS, _LENGTH, 8)(inputs))
  model = keras.Model(inputs, [layers.Dense(_WORDS)(hidden), hidden])
  model.compile('adam', [common.crossentropy(), None])
  found = common.fitted(model, dataset)
  tokens = np.ones([1, _LENGTH], 'i4')
  for i in range(1, 4):
    logits, _ = model.predict(tokens, verbose=0)
    tokens[0, i] = np.argmax(logits[0, i - 1])
  return found, tokens


def _bilstm():
  x, y = _texts()
  model = keras.Sequential(
    [
      layers.Input([None], dtype='int32'),
      layers.Embedding(_WORDS, 8, mask_zero=True),
      layers.Bidirectional(layers.LSTM(4, dropout=0.2)),
      layers.Dense(1, 'sigmoid'),
    ]
  )
  loss = 'binary_crossentropy'
  return common.train(model, x, y, loss=loss, metrics=['accuracy'])


def _seq2seq():
  """Trains a sequence-to-sequence model with teacher forcing."""
  source, _ = _texts()
  target = np.random.default_rng(8).integers(1, _WORDS, (_ROWS, _LENGTH + 1))
  target[:, 4:][source[:, 4:].sum(1) == 0] = 0
  encoder_in = layers.Input([None], dtype='int32', name='source')
  embedding = layers.Embedding(_WORDS, 8, mask_zero=True)
  _, state = layers.GRU(8, return_state=True)(embedding(encoder_in))
  decoder_in = layers.Input([None], dtype='int32', name='target')
  embedded = layers.Embedding(_WORDS, 8, mask_zero=True)(decoder_in)
  hidden = layers.GRU(8, return_sequences=True)(embedded, initial_state=state)
  outputs = layers.Dense(_WORDS, 'softmax')(layers.Dropout(0.2)(hidden))
  model = keras.Model([encoder_in, decoder_in], outputs)
  model.compile(
    'rmsprop', 'sparse_categorical_crossentropy', weighted_metrics=['accuracy']
  )
  x = {'source': source, 'target': target[:, :-1]}
  return common.results(model, x, target[:, 1:])


# Other sequences.


def _next_frame():
  frames = np.random.default_rng(9).random((_ROWS, 4, 5, 5, 1)).astype('f4')
  inputs = layers.Input([None, 5, 5, 1])
  hidden = layers.ConvLSTM2D(3, 3, padding='same', return_sequences=True)(
    inputs
  )
  hidden = layers.BatchNormalization()(hidden)
  outputs = layers.Conv3D(1, 3, padding='same', activation='sigmoid')(hidden)
  model = keras.Model(inputs, outputs)
  x, y = frames[:, :-1], frames[:, 1:]
  return common.train(model, x, y, loss='binary_crossentropy', epochs=1)


def _time_series():
  """Trains convolutions over windows of a time series, which Keras cuts."""
  rng = np.random.default_rng(10)
  series = np.cumsum(rng.normal(size=(90, 2)), 0).astype('f4')
  dataset = keras.utils.timeseries_dataset_from_array(
    series[:-12], series[12:, 0], sequence_length=8, batch_size=32
  )
  model = keras.Sequential(
    [
      layers.Input([8, 2]),
      layers.Conv1D(4, 3, padding='causal', dilation_rate=2, activation='relu'),
      layers.MaxPooling1D(2),
      layers.LayerNormalization(),
      layers.LSTM(4),
      layers.Dense(1),
    ]
  )
  return common.train(
    model,
    dataset,
    optimizer=keras.optimizers.Adam(1e-2),
    loss='huber',
    metrics=['mae'],
    validation_data=dataset,
  )


PROGRAMS = {
  'image_classification': _image_classification,
  'augmentations': _augmentations,
  'transfer_learning': _transfer_learning,
  'resnet': _resnet,
  'mobilenet': _application(keras.applications.MobileNetV2, alpha=0.35),
  'efficientnet': _application(keras.applications.EfficientNetV2B0),
  'vision_transformer': _vision_transformer,
  'unet': _unet,
  'text_transformer': _text_transformer,
  'mini_gpt': _mini_gpt,
  'bilstm': _bilstm,
  'seq2seq': _seq2seq,
  'next_frame': _next_frame,
  'time_series': _time_series,
}
