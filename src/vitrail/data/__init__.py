"""Reading data; knows no model."""
