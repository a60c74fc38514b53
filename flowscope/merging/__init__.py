"""The rules at merge sites: what `wrap` puts in the place of `x + f`."""
