//! The tree, on an image file.

use std::path::Path;
use std::sync::Arc;

use ramet_betree::{Batch, FormatOptions, OpenOptions, Tree};
use ramet_block::{Access, Device, FileDevice, create_image};

use crate::Outcome;
use crate::engine::{Engine, tally};
use crate::load::{Key, Value};

const IMAGE_BYTES: u64 = 12 << 30;

pub struct Ramet(Tree);

impl Ramet {
    pub fn open(dir: &Path, cache_bytes: usize) -> Outcome<Self> {
        let path = dir.join("image");
        let device: Arc<dyn Device> = if path.exists() {
            Arc::new(FileDevice::open(&path, Access::ReadWrite)?)
        } else {
            let device: Arc<dyn Device> = Arc::new(create_image(&path, IMAGE_BYTES, false)?);
            Tree::format(&device, &FormatOptions::default())?;
            device
        };
        let options = OpenOptions {
            cache_bytes: Some(cache_bytes as u64),
            ..OpenOptions::default()
        };
        Ok(Self(Tree::open(device, options)?))
    }
}

impl Engine for Ramet {
    fn insert(&mut self, entries: &[(Key, Value)]) -> Outcome<()> {
        let mut batch = Batch::new();
        for (key, value) in entries {
            batch.put(key.to_vec(), value.to_vec());
        }
        self.0.apply(batch)?;
        Ok(())
    }

    fn sync(&mut self) -> Outcome<()> {
        Ok(self.0.sync()?)
    }

    fn get(&self, key: &[u8]) -> Outcome<bool> {
        Ok(self.0.get(key)?.is_some())
    }

    fn scan(&self, lo: &[u8], limit: usize) -> Outcome<(usize, u64)> {
        tally(self.0.scan(lo, None), limit)
    }

    fn delete_range(&mut self, lo: &[u8], hi: &[u8]) -> Outcome<()> {
        let mut batch = Batch::new();
        batch.delete_range(lo.to_vec(), Some(hi.to_vec().into()));
        self.0.apply(batch)?;
        Ok(())
    }

    fn clone_prefix(&mut self, src: &[u8], dst: &[u8]) -> Outcome<()> {
        let mut batch = Batch::new();
        batch.clone_prefix(src.to_vec(), dst.to_vec());
        self.0.apply(batch)?;
        Ok(())
    }

    fn settle(&mut self) -> Outcome<()> {
        Ok(self.0.checkpoint()?)
    }

    fn close(self: Box<Self>) -> Outcome<()> {
        if std::env::var_os("RAMET_STATS").is_some() {
            eprintln!("{:#?}", self.0.stats());
        }
        Ok(self.0.close()?)
    }
}
