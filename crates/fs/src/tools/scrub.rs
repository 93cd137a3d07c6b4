//! Scrubbing page by page, and damaged keys as a user knows them.

use std::collections::VecDeque;

use bytes::Bytes;
use ramet_betree::{Damage, Scrub};

use crate::error::Result;
use crate::format::blocks::BLOCK_BYTES;
use crate::format::keys;

/// Bytes that one call reads, so that it takes no more than a moment.
const STEP_BYTES: u64 = 8 << 20;
/// Findings in one answer, and the longest text in one, so that it fits an ioctl.
const FINDINGS_MAX: usize = 8;
const TEXT_BYTES_MAX: usize = 400;

/// A scrub that is under way.
pub(crate) struct Scrubbing {
    pub(crate) scrub: Scrub,
    pub(crate) found: VecDeque<Damage>,
}

/// Answer to [`SCRUB`](crate::tools::control::SCRUB). Sizes in bytes.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct ScrubPage {
    /// Bytes that were read so far.
    pub done_bytes: u64,
    /// Estimate of the bytes to be read in all.
    pub total_bytes: u64,
    /// No page follows.
    pub is_last: bool,
    /// The damage found.
    pub found: Vec<Damaged>,
}

/// Damage of a structure on the device.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Damaged {
    /// The structure.
    pub what: String,
    /// Its address, in bytes from the start of the device.
    pub addr: u64,
    /// How it is damaged.
    pub detail: String,
    /// The part of the tree of files that can no longer be read. A clone may show it in other paths
    /// too.
    pub location: Option<String>,
    /// The structure was written again.
    pub is_repaired: bool,
}

impl Scrubbing {
    /// Reads on, and gives the damage that was found.
    pub(crate) fn next_page(&mut self) -> Result<ScrubPage> {
        if self.found.is_empty() && !self.scrub.is_done() {
            self.found.extend(self.scrub.step(STEP_BYTES)?);
        }
        let count = self.found.len().min(FINDINGS_MAX);
        let found = self.found.drain(..count).map(damaged).collect();
        Ok(ScrubPage {
            done_bytes: self.scrub.done_bytes(),
            total_bytes: self.scrub.total_bytes(),
            is_last: self.found.is_empty() && self.scrub.is_done(),
            found,
        })
    }
}

/// Damage as a user knows it.
pub(crate) fn damaged(damage: Damage) -> Damaged {
    let location = damage.keys.map(|(lo, hi)| location(&lo, hi.as_ref()));
    Damaged {
        what: damage.what.to_owned(),
        addr: damage.addr,
        detail: shortened(damage.detail),
        location: location.map(shortened),
        is_repaired: damage.is_repaired,
    }
}

fn shortened(mut text: String) -> String {
    if text.len() > TEXT_BYTES_MAX {
        text.truncate(text.floor_char_boundary(TEXT_BYTES_MAX));
        text.push_str("...");
    }
    text
}

/// The keys `[lo, hi)` as a user knows them.
fn location(lo: &Bytes, hi: Option<&Bytes>) -> String {
    let what = match lo.first() {
        Some(&keys::DATA) => "contents",
        _ if hi.is_some_and(|hi| hi.first() == Some(&keys::META)) => "names and attributes",
        _ => "names, attributes and contents",
    };
    let (from, first) = readable(lo);
    let Some((to, last)) = hi.map(|hi| readable(hi)) else {
        return format!("{what} from {from} on");
    };
    match (first, last) {
        (Some(first), Some(last)) if from == to => format!(
            "{from}, bytes {} to {}",
            first.saturating_mul(BLOCK_BYTES),
            last.saturating_mul(BLOCK_BYTES)
        ),
        _ => format!("{what} from {from} to {to}"),
    }
}

/// The path that a key, or the front of one, belongs to, and the block that it names.
fn readable(key: &[u8]) -> (String, Option<u64>) {
    if let Some((id, key)) = keys::in_snapshot(key) {
        let (path, block) = readable(&key);
        return (format!("{path} of snapshot {id}"), block);
    }
    if let Some((id, key)) = keys::in_fork_base(key) {
        let (path, block) = readable(&key);
        return (format!("{path} of base {id} of a fork"), block);
    }
    let mut path = String::new();
    let mut rest = key.get(1..).unwrap_or_default();
    let mut block = None;
    while let [0, tag, tail @ ..] = rest {
        let name = tail.split(|&byte| byte == 0).next().unwrap_or_default();
        rest = match tag {
            1 | 2 => {
                path.push('/');
                // The text is for terminals, so control characters are escaped.
                path.extend(String::from_utf8_lossy(name).escape_debug());
                &tail[name.len()..]
            }
            3 => {
                let mut number = [0; 8];
                let len = tail.len().min(8);
                number[..len].copy_from_slice(&tail[..len]);
                block = Some(u64::from_be_bytes(number));
                &[]
            }
            5 => {
                path.push_str("/(a file with several names)");
                tail.get(8..).unwrap_or_default()
            }
            _ => &[],
        };
    }
    if path.is_empty() {
        path.push('/');
    }
    (path, block)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn damaged_keys_are_told_as_paths_and_bytes() {
        let file = keys::blocks(&keys::child(&keys::child(b"", b"dir"), b"file"));
        let block = |n| keys::block(&file, n);
        assert_eq!(
            location(&block(3), Some(&block(9))),
            "/dir/file, bytes 12288 to 36864"
        );
        let entry = |name: &[u8]| keys::entry(&keys::child(b"", b"dir"), name);
        assert_eq!(
            location(&entry(b"a"), Some(&entry(b"b"))),
            "names and attributes from /dir/a to /dir/b"
        );
        assert_eq!(
            location(&Bytes::new(), None),
            "names, attributes and contents from / on"
        );
        assert_eq!(location(&block(1), None), "contents from /dir/file on");
        let inside = |key: &[u8]| [&key[..1], &keys::snapshot_base(5), &key[1..]].concat();
        let [lo, hi] = [3, 9].map(|number| Bytes::from(inside(&block(number))));
        assert_eq!(
            location(&lo, Some(&hi)),
            "/dir/file of snapshot 5, bytes 12288 to 36864"
        );
        // Edges hold the front of a key.
        for key in [&block(1)[..], &lo] {
            for len in 0..key.len() {
                readable(&key[..len]);
            }
        }
    }
}
