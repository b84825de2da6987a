"""Networks and layouts that several attacks share."""
