"""Two runs of one recipe, side by side: what was set up differently, and the first place where their numbers part.

`differences` lists what their headers say, `matching` finds the places that belong together. No torch: everything is
read from records.
"""
