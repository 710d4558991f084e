"""The version of the package: the one place that states it.

`setup.py` reads this file as text, so that building a wheel imports nothing.
"""

__version__ = '0.1.0'
