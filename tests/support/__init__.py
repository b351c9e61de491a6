"""What tests of several folders share: references, models, fakes and checks."""
