"""The whole recipe, from captions to ranked and scored pictures, in one resumable run."""
