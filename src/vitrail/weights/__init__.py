"""Weights in and out: safetensors, the hub, and every other library's form."""

from vitrail.weights.errors import LoadError, LoadWarning, SaveError
from vitrail.weights.forms import FORMS
from vitrail.weights.loading import load
from vitrail.weights.saving import convert, save

__all__ = ["FORMS", "LoadError", "LoadWarning", "SaveError", "convert", "load", "save"]
