//! Rodeh's B-trees with shadowing and clones, on an image file. The trees are those of Ramet's node
//! table (`ramet_nodetable::pages`); the clones of whole trees, and the counts that they need, are
//! this engine's own.
//!
//! A table of the load is a tree, so a clone of a table is one more pointer to a root page. A
//! sync is a commit: dirty pages, device sync, a header that names the roots, device sync. There
//! is no journal.
//!
//! The header is the first block, and it is written in place: a power cut may tear it. That is no
//! concern of a bench, and costs what a superblock costs.

use std::collections::BTreeMap;
use std::sync::Arc;

use ramet_block::create_image;
use ramet_block::{Access, BLOCK_BYTES, Device, Extent, FileDevice, PageRef, Reader, Writer};
use ramet_nodetable::pages::{Shape, Structure};

use crate::engine::{Engine, digest};
use crate::load::{Key, Value};
use crate::{Measure, Outcome};

mod counts;
mod forest;
#[cfg(test)]
mod model;

use forest::{Forest, ForestRoots, Tree, clone_tree, delete_tree};

const IMAGE_BYTES: u64 = 12 << 30;
const SHAPE: Shape = Shape::new(Structure::NodeTable, 8192);

pub struct Rodeh {
    device: Arc<dyn Device>,
    forest: Forest,
    /// By the first byte of their keys, which the keys in a tree lack.
    tables: BTreeMap<u8, Tree>,
}

impl Rodeh {
    pub fn open(measure: &Measure) -> Outcome<Self> {
        let path = measure.dir.join("rodeh");
        let exists = path.exists();
        let device: Arc<dyn Device> = if exists {
            Arc::new(FileDevice::open(&path, Access::ReadWrite)?)
        } else {
            Arc::new(create_image(&path, IMAGE_BYTES)?)
        };
        let usable = Extent::new(BLOCK_BYTES, device.len_bytes() - BLOCK_BYTES);
        let cache_bytes = measure.cache as u64;
        if !exists {
            let forest = Forest::format(&device, usable, cache_bytes)?;
            let tables = BTreeMap::new();
            let mut engine = Self {
                device,
                forest,
                tables,
            };
            engine.commit()?;
            return Ok(engine);
        }
        let mut header = vec![0; BLOCK_BYTES as usize];
        device.read_at(0, &mut header)?;
        let mut r = Reader::new(&header);
        let maps = ForestRoots {
            space_map: PageRef::decode(&mut r)?,
            refcounts: PageRef::decode(&mut r)?,
        };
        let forest = Forest::open(&device, maps, usable, cache_bytes)?;
        let mut tables = BTreeMap::new();
        for _ in 0..r.u8()? {
            let table = r.u8()?;
            tables.insert(table, forest.tree(SHAPE, PageRef::decode(&mut r)?));
        }
        Ok(Self {
            device,
            forest,
            tables,
        })
    }

    fn commit(&mut self) -> Outcome<()> {
        let mut trees: Vec<&mut Tree> = self.tables.values_mut().collect();
        let (roots, maps, freed) = self.forest.commit(&mut trees)?;
        self.device.sync()?;
        let mut w = Writer::with_capacity(BLOCK_BYTES as usize);
        maps.space_map.encode(&mut w);
        maps.refcounts.encode(&mut w);
        w.u8(u8::try_from(roots.len())?);
        for (table, root) in self.tables.keys().zip(roots) {
            w.u8(*table);
            root.encode(&mut w);
        }
        w.pad_to(BLOCK_BYTES as usize);
        self.device.write_at(0, &w.into_vec())?;
        self.device.sync()?;
        self.forest.committed(freed);
        Ok(())
    }

    fn table(&mut self, table: u8) -> &mut Tree {
        let empty = || self.forest.tree(SHAPE, PageRef::NONE);
        self.tables.entry(table).or_insert_with(empty)
    }
}

fn parts(key: &[u8]) -> Outcome<(u8, &[u8])> {
    let (table, rest) = key.split_first().ok_or("a key has a table")?;
    Ok((*table, rest))
}

/// The keys of `tree` from `from` on, as long as they are meant.
fn keys_while(
    tree: &Tree,
    from: &[u8],
    is_meant: impl Fn(&[u8]) -> bool,
) -> Outcome<Vec<Box<[u8]>>> {
    let mut keys = Vec::new();
    for entry in tree.range(from) {
        let (key, _) = entry?;
        if !is_meant(&key) {
            break;
        }
        keys.push(key);
    }
    Ok(keys)
}

impl Engine for Rodeh {
    fn insert(&mut self, entries: &[(Key, Value)]) -> Outcome<()> {
        for (key, value) in entries {
            let (table, rest) = parts(key)?;
            self.table(table).insert(rest, value)?;
        }
        Ok(())
    }

    fn sync(&mut self) -> Outcome<()> {
        self.commit()
    }

    fn get(&self, key: &[u8]) -> Outcome<bool> {
        let (table, rest) = parts(key)?;
        let found = self.tables.get(&table).map(|tree| tree.lookup(rest));
        Ok(found.transpose()?.flatten().is_some())
    }

    fn scan(&self, lo: &[u8], limit: usize) -> Outcome<(usize, u64)> {
        let (first, rest) = parts(lo)?;
        let (mut count, mut sum) = (0, 0u64);
        for (table, tree) in self.tables.range(first..) {
            let from = if *table == first { rest } else { &[] };
            for entry in tree.range(from).take(limit - count) {
                let (key, value) = entry?;
                count += 1;
                sum = sum.wrapping_add(digest(&key, &value));
            }
        }
        Ok((count, sum))
    }

    fn delete_range(&mut self, lo: &[u8], hi: &[u8]) -> Outcome<()> {
        let ((first, from), (last, to)) = (parts(lo)?, parts(hi)?);
        let tables = self.tables.range(first..=last);
        let tables: Vec<u8> = tables.map(|(table, _)| *table).collect();
        for table in tables {
            let from = if table == first { from } else { &[] };
            if from.is_empty() && table < last {
                if let Some(whole) = self.tables.remove(&table) {
                    delete_tree(whole)?;
                }
                continue;
            }
            let tree = self.table(table);
            let is_meant = |key: &[u8]| table < last || key < to;
            for key in keys_while(tree, from, is_meant)? {
                tree.remove(&key)?;
            }
        }
        Ok(())
    }

    /// One more pointer for whole tables; a part of a table is copied key by key.
    fn clone_prefix(&mut self, src: &[u8], dst: &[u8]) -> Outcome<()> {
        let ((from, part), (to, at)) = (parts(src)?, parts(dst)?);
        if part.is_empty() && at.is_empty() {
            let clone = clone_tree(self.table(from))?;
            if let Some(old) = self.tables.insert(to, clone) {
                delete_tree(old)?;
            }
            return Ok(());
        }
        let source = clone_tree(self.table(from))?;
        for key in keys_while(&source, part, |key| key.starts_with(part))? {
            let value = source.lookup(&key)?.ok_or("a key that was there")?;
            let copy = [at, &key[part.len()..]].concat();
            self.table(to).insert(&copy, &value)?;
        }
        Ok(delete_tree(source)?)
    }

    fn settle(&mut self) -> Outcome<()> {
        self.sync()
    }

    fn close(mut self: Box<Self>) -> Outcome<()> {
        self.sync()
    }
}
