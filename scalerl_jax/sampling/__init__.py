"""The decode side: fixed slots, jitted chunks, refilled between them."""
