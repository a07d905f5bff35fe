"""Plans for people: tables, the explanation, pictures, the report page."""
