//! States of the tree: their digests, which version of a history one is, and whether its invariants
//! hold.

use std::ops::Range;

use ramet_betree::Tree;
use ramet_block::checksum;

use crate::Model;
use crate::outcome::told;

pub(crate) fn verify(tree: &Tree) -> Result<(), String> {
    let violations = told("verify", tree.verify(&mut |_| {}))?;
    match violations.first() {
        None => Ok(()),
        Some(first) => Err(format!(
            "{} violations, the first: {first}",
            violations.len()
        )),
    }
}

/// Keys and values, with their lengths, as one string of bytes.
#[derive(Default)]
struct Digest(Vec<u8>);

impl Digest {
    fn add(&mut self, key: &[u8], value: &[u8]) {
        for part in [key, value] {
            self.0.extend((part.len() as u64).to_le_bytes());
            self.0.extend_from_slice(part);
        }
    }
}

pub(crate) fn digest(model: &Model) -> u64 {
    let mut digest = Digest::default();
    for (key, value) in model.range(b"", None) {
        digest.add(key, value);
    }
    checksum(&digest.0)
}

pub(crate) fn digest_of(tree: &Tree) -> ramet_betree::Result<u64> {
    let mut digest = Digest::default();
    let mut scan = tree.scan(b"", None);
    while scan.advance()? {
        digest.add(scan.key(), scan.value());
    }
    Ok(checksum(&digest.0))
}

/// The newest version among `allowed` that has this digest.
pub(crate) fn find(versions: &[u64], allowed: Range<usize>, digest: u64) -> Option<usize> {
    allowed.rev().find(|&at| versions[at] == digest)
}

pub(crate) fn none_of(versions: &[u64], allowed: Range<usize>, digest: u64) -> String {
    let older = find(versions, 0..versions.len(), digest);
    format!("none of the states allowed, {allowed:?}; it is version {older:?}")
}
