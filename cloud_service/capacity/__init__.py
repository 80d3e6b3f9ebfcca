"""How many edges replicas carry: a simulation by discrete events, with measured costs and no model."""
