"""A cache of 2 to 8 bits per value, by a random rotation and a Lloyd-Max grid.

``cache.py`` is the class, ``head.py`` one head of it, ``config.py`` its settings, ``rotation.py``
the rotation, ``file.py`` saving and loading.
"""
