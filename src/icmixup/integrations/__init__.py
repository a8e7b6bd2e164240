"""Infinite Class Mixup in other frameworks. Import the module of yours: icmixup.integrations.timm and so on.

Importing this package imports no framework. Each module checks the version of its framework first.
"""
