"""Several engines behind one address: replicas on Ray Serve, and simulated fleets of them."""
