//! RocksDB, as it comes, with a block cache of the common size, filters, and its log on.

use std::path::Path;

use rocksdb::{BlockBasedOptions, Cache, DB, Direction, IteratorMode, Options, WriteBatch};

use crate::Outcome;
use crate::engine::{COPY_BATCH, Engine, tally};
use crate::load::{Key, Value};

pub struct Rocks(DB);

impl Rocks {
    pub fn open(dir: &Path, cache_bytes: usize) -> Outcome<Self> {
        let mut blocks = BlockBasedOptions::default();
        blocks.set_block_cache(&Cache::new_lru_cache(cache_bytes));
        blocks.set_bloom_filter(10.0, false);
        blocks.set_cache_index_and_filter_blocks(true);
        let mut options = Options::default();
        options.create_if_missing(true);
        options.set_block_based_table_factory(&blocks);
        options.increase_parallelism(2);
        Ok(Self(DB::open(&options, dir.join("rocksdb"))?))
    }
}

impl Engine for Rocks {
    fn insert(&mut self, entries: &[(Key, Value)]) -> Outcome<()> {
        let mut batch = WriteBatch::default();
        for (key, value) in entries {
            batch.put(key, value);
        }
        Ok(self.0.write(batch)?)
    }

    fn sync(&mut self) -> Outcome<()> {
        Ok(self.0.flush_wal(true)?)
    }

    fn get(&self, key: &[u8]) -> Outcome<bool> {
        Ok(self.0.get_pinned(key)?.is_some())
    }

    fn scan(&self, lo: &[u8], limit: usize) -> Outcome<(usize, u64)> {
        let mode = IteratorMode::From(lo, Direction::Forward);
        tally(self.0.iterator(mode), limit)
    }

    fn delete_range(&mut self, lo: &[u8], hi: &[u8]) -> Outcome<()> {
        let mut batch = WriteBatch::default();
        batch.delete_range(lo, hi);
        Ok(self.0.write(batch)?)
    }

    fn clone_prefix(&mut self, src: &[u8], dst: &[u8]) -> Outcome<()> {
        let mut batch = WriteBatch::default();
        for entry in self.0.iterator(IteratorMode::From(src, Direction::Forward)) {
            let (key, value) = entry?;
            let Some(rest) = key.strip_prefix(src) else {
                break;
            };
            batch.put([dst, rest].concat(), value);
            if batch.len() >= COPY_BATCH {
                self.0.write(std::mem::take(&mut batch))?;
            }
        }
        Ok(self.0.write(batch)?)
    }

    fn settle(&mut self) -> Outcome<()> {
        self.0.flush()?;
        // Asked in this way, any version of the library answers.
        let busy = [
            "rocksdb.compaction-pending",
            "rocksdb.num-running-compactions",
        ];
        loop {
            let mut left = 0;
            for property in busy {
                left += self.0.property_int_value(property)?.unwrap_or(0);
            }
            if left == 0 {
                return Ok(());
            }
            std::thread::sleep(std::time::Duration::from_millis(20));
        }
    }

    fn close(self: Box<Self>) -> Outcome<()> {
        Ok(self.0.flush()?)
    }
}
