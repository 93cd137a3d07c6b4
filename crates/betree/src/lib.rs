//! Placeholder while the crate is being built.
