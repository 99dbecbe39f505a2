"""Keys and values of finished prefills: kept, decoded here, or handed off to another decode engine."""
