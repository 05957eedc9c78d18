"""WebShop: find and buy the product that an instruction asks for."""

from .env import WebShop, WebShopOptions

__all__ = ["WebShop", "WebShopOptions"]
