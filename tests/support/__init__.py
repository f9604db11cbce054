"""What tests share: oracles, broken mechanisms, fabricated runs, training loops."""
