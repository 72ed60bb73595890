"""What layers, caches and both backends lean on: checks of what comes in, formats, memory, options.

Nothing here knows a layer, a cache or a backend. Of the rest of the package it imports
:mod:`kvedge.errors` alone.
"""
