//! LMDB: copy-on-write pages in a memory map. It has no log: a batch is a transaction without a sync, and
//! a sync writes every page that changed since the one before. The kernel's page cache is its cache.

use std::ops::Bound;
use std::path::Path;

use heed::types::Bytes;
use heed::{Database, Env, EnvFlags, EnvOpenOptions};

use crate::Outcome;
use crate::engine::{COPY_BATCH, Engine, tally};
use crate::load::{Key, Value};

const MAP_BYTES: usize = 24 << 30;

pub struct Lmdb {
    env: Env,
    db: Database<Bytes, Bytes>,
}

impl Lmdb {
    pub fn open(dir: &Path) -> Outcome<Self> {
        let path = dir.join("lmdb");
        std::fs::create_dir_all(&path)?;
        let mut options = EnvOpenOptions::new();
        options.map_size(MAP_BYTES);
        // SAFETY: the folder belongs to this process alone and no file in it is changed by other means. Without
        // syncs a power cut may break the map, which nobody opens again then.
        let env = unsafe {
            options
                .flags(EnvFlags::NO_SYNC | EnvFlags::NO_READ_AHEAD)
                .open(path)?
        };
        let mut txn = env.write_txn()?;
        let db = env.create_database(&mut txn, None)?;
        txn.commit()?;
        Ok(Self { env, db })
    }

    fn entries(&self, lo: &[u8], limit: usize) -> Outcome<Vec<(Vec<u8>, Vec<u8>)>> {
        let txn = self.env.read_txn()?;
        let range = (Bound::Included(lo), Bound::Unbounded);
        let mut found = Vec::new();
        for entry in self.db.range(&txn, &range)?.take(limit) {
            let (key, value) = entry?;
            found.push((key.to_vec(), value.to_vec()));
        }
        Ok(found)
    }
}

impl Engine for Lmdb {
    fn insert(&mut self, entries: &[(Key, Value)]) -> Outcome<()> {
        let mut txn = self.env.write_txn()?;
        for (key, value) in entries {
            self.db.put(&mut txn, key, value)?;
        }
        Ok(txn.commit()?)
    }

    fn sync(&mut self) -> Outcome<()> {
        Ok(self.env.force_sync()?)
    }

    fn get(&self, key: &[u8]) -> Outcome<bool> {
        let txn = self.env.read_txn()?;
        Ok(self
            .db
            .get(&txn, key)?
            .is_some_and(|value| value.iter().fold(0, |sum, byte| sum | byte) != 0))
    }

    fn scan(&self, lo: &[u8], limit: usize) -> Outcome<(usize, u64)> {
        let txn = self.env.read_txn()?;
        let range = (Bound::Included(lo), Bound::Unbounded);
        tally(self.db.range(&txn, &range)?, limit)
    }

    fn delete_range(&mut self, lo: &[u8], hi: &[u8]) -> Outcome<()> {
        let mut txn = self.env.write_txn()?;
        let range = (Bound::Included(lo), Bound::Excluded(hi));
        self.db.delete_range(&mut txn, &range)?;
        Ok(txn.commit()?)
    }

    fn clone_prefix(&mut self, src: &[u8], dst: &[u8]) -> Outcome<()> {
        let mut lo = src.to_vec();
        loop {
            let mut found = self.entries(&lo, COPY_BATCH)?;
            found.retain(|(key, _)| key.starts_with(src));
            let Some((last, _)) = found.last() else {
                return Ok(());
            };
            lo = [&last[..], &[0]].concat();
            let mut txn = self.env.write_txn()?;
            for (key, value) in &found {
                let key = [dst, &key[src.len()..]].concat();
                self.db.put(&mut txn, &key, value)?;
            }
            txn.commit()?;
        }
    }

    fn settle(&mut self) -> Outcome<()> {
        self.sync()
    }

    fn close(mut self: Box<Self>) -> Outcome<()> {
        self.sync()?;
        self.env.prepare_for_closing().wait();
        Ok(())
    }
}
