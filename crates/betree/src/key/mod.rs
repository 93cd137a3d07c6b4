//! Keys: ranges, translations and fingerprints.

pub(crate) mod fingerprints;
pub(crate) mod range;
pub(crate) mod translation;
