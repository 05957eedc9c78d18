"""WebShop: find and buy the product that an instruction asks for."""
