"""Transport of weight buckets from rank 0 of a trainer to generators: routes by placement, a sender, a receiver."""
