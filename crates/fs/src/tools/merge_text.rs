//! Texts that both sides of a merge changed.

use std::sync::atomic::{AtomicU64, Ordering};

use bytes::Bytes;

use crate::error::{Error, Result};
use crate::format::blocks::BLOCK;
use crate::format::keys;
use crate::tools::diff::{Object, Side};

/// Longest text that is merged by lines, and most lines of one.
const TEXT_BYTES_MAX: usize = 512 << 10;
const LINES_MAX: usize = 10_000;
/// Bytes of the merged texts of one merge, at most.
const ALL_BYTES_MAX: u64 = 4 << 20;
/// Work of one merge at most, in pairs of lines: a comparison of texts without a line in common
/// takes the square of their lines. That is about two seconds.
const WORK_MAX: u64 = 400_000_000;

/// The texts that one merge may still compare and hold, over all tries.
pub(crate) struct MergedTexts {
    work: AtomicU64,
    bytes: AtomicU64,
}

impl Default for MergedTexts {
    fn default() -> Self {
        Self {
            work: AtomicU64::new(WORK_MAX),
            bytes: AtomicU64::new(ALL_BYTES_MAX),
        }
    }
}

/// Takes `amount` of the rest, if it is left.
fn take(rest: &AtomicU64, amount: u64) -> bool {
    let less = |rest: u64| rest.checked_sub(amount);
    rest.fetch_update(Ordering::SeqCst, Ordering::SeqCst, less)
        .is_ok()
}

impl MergedTexts {
    /// The three texts as one, if no line was changed in two ways, and whether it is that of the
    /// destination. `None` also for files that are too long, or no text, and when the merge has had
    /// its share of work.
    ///
    /// # Errors
    /// Those of the tree.
    pub(crate) fn merge(&self, objects: [(&Side, &Object); 3]) -> Result<Option<(Bytes, bool)>> {
        let mut texts: [Vec<u8>; 3] = Default::default();
        for (text, object) in texts.iter_mut().zip(objects) {
            match read_text(object)? {
                Some(found) => *text = found,
                None => return Ok(None),
            }
        }
        let [base, fork, dst] = texts.each_ref();
        let [of_base, of_fork, of_dst] = [base, fork, dst].map(|text| lines(text));
        let work = (of_base + of_fork.max(of_dst)).pow(2);
        let bytes = (fork.len() + dst.len()) as u64;
        if !take(&self.work, work) || !take(&self.bytes, bytes) {
            return Ok(None);
        }
        let merged = diffy::merge_bytes(base, dst, fork).ok();
        Ok(merged.map(|text| {
            let is_dst = text == *dst;
            (text.into(), is_dst)
        }))
    }
}

fn lines(text: &[u8]) -> u64 {
    text.iter().filter(|&&byte| byte == b'\n').count() as u64 + 1
}

/// The contents of a file, if they are a text that is not too long.
fn read_text((side, object): (&Side, &Object)) -> Result<Option<Vec<u8>>> {
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
    let is_text = !text.contains(&0) && lines(&text) <= LINES_MAX as u64;
    Ok(is_text.then_some(text))
}
