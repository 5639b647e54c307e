"""The tests are tested: rules of the product are broken on purpose, one at a time, and somebody must notice."""
