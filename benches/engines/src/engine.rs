//! What is asked of every engine.

use crate::load::{Key, Value};
use crate::{Measure, Outcome};

/// An ordered map on the device.
pub trait Engine {
    /// One atomic batch; durable after the next [`Engine::sync`].
    fn insert(&mut self, batch: &[(Key, Value)]) -> Outcome<()>;
    /// Everything before is durable.
    fn sync(&mut self) -> Outcome<()>;
    /// Whether the key is there; its value is read.
    fn get(&self, key: &[u8]) -> Outcome<bool>;
    /// Up to `limit` entries from `lo` on: their number, and a sum over their bytes.
    fn scan(&self, lo: &[u8], limit: usize) -> Outcome<(usize, u64)>;
    /// Removes `[lo, hi)`.
    fn delete_range(&mut self, lo: &[u8], hi: &[u8]) -> Outcome<()>;
    /// Copies every key that starts with `src` to the one with `dst` in its place.
    fn clone_prefix(&mut self, src: &[u8], dst: &[u8]) -> Outcome<()>;
    /// Waits until what was put off is done, and is durable.
    fn settle(&mut self) -> Outcome<()>;
    /// Closes in good order.
    fn close(self: Box<Self>) -> Outcome<()>;
}

pub const NAMES: [&str; 5] = ["ramet", "rodeh", "rocksdb", "lmdb", "redb"];

/// Opens, or makes, a map in the folder.
pub fn open(options: &Measure) -> Outcome<Box<dyn Engine>> {
    #[cfg(feature = "others")]
    let (dir, cache_bytes) = (&*options.dir, options.cache);
    Ok(match &*options.engine {
        "ramet" => Box::new(crate::ramet::Ramet::open(options)?),
        "rodeh" => Box::new(crate::rodeh::Rodeh::open(options)?),
        #[cfg(feature = "others")]
        "rocksdb" => Box::new(crate::rocks::Rocks::open(dir, cache_bytes)?),
        #[cfg(feature = "others")]
        "lmdb" => Box::new(crate::lmdb::Lmdb::open(dir)?),
        #[cfg(feature = "others")]
        "redb" => Box::new(crate::redb::Redb::open(dir, cache_bytes)?),
        name => return Err(format!("no engine is called {name}").into()),
    })
}

/// A sum over an entry, so that no engine can leave its bytes unread.
pub fn digest(key: &[u8], value: &[u8]) -> u64 {
    let word = |bytes: &[u8]| {
        bytes
            .last_chunk::<8>()
            .map_or(0, |last| u64::from_le_bytes(*last))
    };
    word(key).rotate_left(9) ^ word(value)
}

/// Sums up a scan.
#[cfg(feature = "others")]
pub fn tally<K: AsRef<[u8]>, V: AsRef<[u8]>, E: Into<crate::Failure>>(
    entries: impl Iterator<Item = Result<(K, V), E>>,
    limit: usize,
) -> Outcome<(usize, u64)> {
    let (mut count, mut sum) = (0, 0u64);
    for entry in entries.take(limit) {
        let (key, value) = entry.map_err(Into::into)?;
        count += 1;
        sum = sum.wrapping_add(digest(key.as_ref(), value.as_ref()));
    }
    Ok((count, sum))
}

/// Batches of a copy of a range, for engines that can do no better.
#[cfg(feature = "others")]
pub const COPY_BATCH: usize = 1000;
