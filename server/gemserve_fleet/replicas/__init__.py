"""Several engines behind one address: an ingress relays each request to a replica."""
