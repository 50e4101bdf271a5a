"""Any vision tower of fixed size that transformers' `AutoModel` knows: a model that maps pixels to tokens."""

from precompute.encoders.towers.place import Place
from precompute.encoders.towers.vision import vision_family

FAMILY = vision_family(lambda class_name: Place())
