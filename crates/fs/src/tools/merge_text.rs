//! Texts that both sides of a merge changed.

use std::collections::HashMap;

use bytes::Bytes;
use parking_lot::Mutex;

use crate::error::{Error, Result};
use crate::format::blocks::BLOCK;
use crate::format::keys;
use crate::tools::diff::{Object, Side};

/// Longest text that is merged by lines, and most lines of one. The time of a comparison grows with
/// the lines times those that differ.
const TEXT_BYTES_MAX: usize = 512 << 10;
const LINES_MAX: usize = 10_000;

/// Base, fork and destination.
type Texts = [Bytes; 3];

/// Merged texts, for the comparisons of one merge: a comparison under locks finds them.
#[derive(Default)]
pub(crate) struct MergedTexts(Mutex<HashMap<Texts, Option<Bytes>>>);

impl MergedTexts {
    /// The three texts as one, if no line was changed in two ways. `None` also for files that are
    /// too long, or no text.
    ///
    /// # Errors
    /// Those of the tree.
    pub(crate) fn merge(&self, objects: [(&Side, &Object); 3]) -> Result<Option<Bytes>> {
        let mut texts: Texts = Default::default();
        for (text, object) in texts.iter_mut().zip(objects) {
            match read_text(object)? {
                Some(found) => *text = found,
                None => return Ok(None),
            }
        }
        let mut known = self.0.lock();
        if let Some(merged) = known.get(&texts) {
            return Ok(merged.clone());
        }
        let [base, fork, dst] = &texts;
        let merged = diffy::merge_bytes(base, dst, fork).ok().map(Bytes::from);
        known.insert(texts, merged.clone());
        Ok(merged)
    }
}

/// The contents of a file, if they are a text that is not too long.
fn read_text((side, object): (&Side, &Object)) -> Result<Option<Bytes>> {
    let len = usize::try_from(object.record.size_bytes).unwrap_or(usize::MAX);
    if len > TEXT_BYTES_MAX {
        return Ok(None);
    }
    let mut text = vec![0; len];
    let blocks = keys::blocks(&object.path);
    let end = ramet_betree::successor_of_prefix(&blocks);
    let mut scan = side.snapshot.scan(&blocks, end.as_deref());
    while scan.advance()? {
        let number = keys::block_number(&blocks, scan.key()).ok_or_else(|| Error::Corrupt {
            what: "key of a block",
            detail: format!("{:?}", scan.key()),
        })?;
        let start = usize::try_from(number)
            .unwrap_or(usize::MAX)
            .saturating_mul(BLOCK);
        let value = scan.value();
        if let Some(room) = text.get_mut(start..) {
            let len = room.len().min(value.len());
            room[..len].copy_from_slice(&value[..len]);
        }
    }
    let lines = text.iter().filter(|&&byte| byte == b'\n').count();
    let is_text = !text.contains(&0) && lines <= LINES_MAX;
    Ok(is_text.then(|| text.into()))
}
