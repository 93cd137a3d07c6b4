//! The tree, on an image file.

use std::sync::Arc;

use ramet_betree::{Batch, FormatOptions, OpenOptions, Tree, TreeShape};
use ramet_block::{Access, Codec, Device, FileDevice, create_image};

use crate::engine::{Engine, digest};
use crate::load::{Key, Value};
use crate::{Measure, Outcome};

const IMAGE_BYTES: u64 = 12 << 30;

pub struct Ramet(Tree);

impl Ramet {
    pub fn open(measure: &Measure) -> Outcome<Self> {
        let path = measure.dir.join("image");
        let device: Arc<dyn Device> = if path.exists() {
            Arc::new(FileDevice::open(&path, Access::ReadWrite)?)
        } else {
            let device: Arc<dyn Device> = Arc::new(create_image(&path, IMAGE_BYTES)?);
            // No engine compresses.
            let format = FormatOptions {
                codec: Some(Codec::Raw),
                ..FormatOptions::default()
            };
            Tree::format(&device, &format)?;
            device
        };
        let mut options = OpenOptions {
            cache_bytes: Some(measure.cache as u64),
            ..OpenOptions::default()
        };
        let usual = TreeShape::default();
        let (theta, memory, buffer) = (measure.theta, measure.memory_bytes, measure.buffer_bytes);
        let (segments, block) = (measure.segments, measure.block_bytes);
        if theta.or(memory).or(buffer).or(segments).or(block).is_some() {
            options.shape = Some(TreeShape {
                block_bytes: block.unwrap_or(usual.block_bytes),
                theta_256: theta.unwrap_or(usual.theta_256),
                memory_bytes: memory.unwrap_or(usual.memory_bytes),
                buffer_bytes: buffer.unwrap_or(usual.buffer_bytes),
                segments: segments.unwrap_or(usual.segments),
                ..usual
            });
        }
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
        let mut scan = self.0.scan(lo, None);
        let (mut count, mut sum) = (0, 0u64);
        while count < limit && scan.advance()? {
            count += 1;
            sum = sum.wrapping_add(digest(scan.key(), scan.value()));
        }
        Ok((count, sum))
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
