"""The go-live checklist: each line pass, warn or fail, with its evidence from the live fleet.

``facts`` asks the gateway, the modules by subject judge, ``lines`` has the order, ``run`` runs all.
"""
