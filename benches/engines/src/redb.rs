//! redb: copy-on-write B-trees in pure Rust. A batch is a commit without durability, a sync one with it.

use std::path::Path;

use redb::{Builder, Database, Durability, ReadableDatabase, TableDefinition};

use crate::Outcome;
use crate::engine::{COPY_BATCH, Engine, digest};
use crate::load::{Key, Value};

const TABLE: TableDefinition<&[u8], &[u8]> = TableDefinition::new("t");

pub struct Redb(Database);

impl Redb {
    pub fn open(dir: &Path, cache_bytes: usize) -> Outcome<Self> {
        let db = Builder::new()
            .set_cache_size(cache_bytes)
            .create(dir.join("redb"))?;
        let engine = Self(db);
        engine.write(Durability::Immediate, |_| Ok(()))?;
        Ok(engine)
    }

    fn write(
        &self,
        durability: Durability,
        change: impl FnOnce(&mut redb::Table<'_, &'static [u8], &'static [u8]>) -> Outcome<()>,
    ) -> Outcome<()> {
        let mut txn = self.0.begin_write()?;
        txn.set_durability(durability)?;
        {
            let mut table = txn.open_table(TABLE)?;
            change(&mut table)?;
        }
        Ok(txn.commit()?)
    }
}

impl Engine for Redb {
    fn insert(&mut self, entries: &[(Key, Value)]) -> Outcome<()> {
        self.write(Durability::None, |table| {
            for (key, value) in entries {
                table.insert(&key[..], &value[..])?;
            }
            Ok(())
        })
    }

    fn sync(&mut self) -> Outcome<()> {
        self.write(Durability::Immediate, |_| Ok(()))
    }

    fn get(&self, key: &[u8]) -> Outcome<bool> {
        let table = self.0.begin_read()?.open_table(TABLE)?;
        Ok(table
            .get(key)?
            .is_some_and(|value| !value.value().is_empty()))
    }

    fn scan(&self, lo: &[u8], limit: usize) -> Outcome<(usize, u64)> {
        let table = self.0.begin_read()?.open_table(TABLE)?;
        let (mut count, mut sum) = (0, 0u64);
        for entry in table.range(lo..)?.take(limit) {
            let (key, value) = entry?;
            count += 1;
            sum = sum.wrapping_add(digest(key.value(), value.value()));
        }
        Ok((count, sum))
    }

    fn delete_range(&mut self, lo: &[u8], hi: &[u8]) -> Outcome<()> {
        self.write(Durability::None, |table| {
            Ok(table.retain_in(lo..hi, |_, _| false)?)
        })
    }

    fn clone_prefix(&mut self, src: &[u8], dst: &[u8]) -> Outcome<()> {
        let source = self.0.begin_read()?.open_table(TABLE)?;
        let mut entries = source.range(src..)?;
        loop {
            let mut done = false;
            self.write(Durability::None, |table| {
                for _ in 0..COPY_BATCH {
                    let Some(entry) = entries.next() else {
                        done = true;
                        break;
                    };
                    let (key, value) = entry?;
                    let Some(rest) = key.value().strip_prefix(src) else {
                        done = true;
                        break;
                    };
                    table.insert(&[dst, rest].concat()[..], value.value())?;
                }
                Ok(())
            })?;
            if done {
                return Ok(());
            }
        }
    }

    fn settle(&mut self) -> Outcome<()> {
        self.sync()
    }

    fn close(mut self: Box<Self>) -> Outcome<()> {
        self.sync()
    }
}
