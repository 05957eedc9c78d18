"""Catalogues of products: generated or loaded, and stored in a folder that processes map into memory."""
