//! Checks of the sources of this workspace: which file imports which, how large types and functions are, and which words
//! comments use.
//!
//! [`source`] reads a file without its comments, strings and tests, [`imports`] finds the modules of a crate and the arrows
//! between them, [`floors`] compares the arrows with the floors that `floors.txt` declares, [`sizes`] counts lines and
//! methods, [`words`] finds comments whose subject is no noun, and [`docs`] finds lines and names in documents that are wrong.
//!
//! The reader knows no types: a call of a method is not an arrow, the import of its type is.
#![forbid(unsafe_code)]

pub mod docs;
pub mod files;
pub mod floors;
pub mod imports;
pub mod sizes;
pub mod source;
pub mod words;
