//! Mounts a volume in memory: `memory DIR [BYTES] [OPTIONS]`. It is gone when DIR is unmounted.

use std::error::Error;
use std::path::Path;
use std::sync::Arc;

use ramet_block::{Device, MemDevice};
use ramet_fs::{FormatOptions, OpenOptions, Volume};
use ramet_fuse::{MountOptions, mount};

fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1);
    let dir = arguments
        .next()
        .ok_or("usage: memory DIR [BYTES] [OPTIONS]")?;
    let bytes = arguments
        .next()
        .map_or(Ok(1 << 30), |bytes| bytes.parse())?;
    let mut options = MountOptions::new("memory");
    options.add(&arguments.next().unwrap_or_default())?;
    let device: Arc<dyn Device> = Arc::new(MemDevice::new(bytes));
    Volume::format(&device, &FormatOptions::default())?;
    let volume = Volume::open(device, OpenOptions::default())?;
    mount(Arc::clone(&volume), Path::new(&dir), &options)?.wait()?;
    for finding in volume.controls().check()? {
        println!("{}: {}", finding.invariant, finding.detail);
    }
    volume.close()?;
    Ok(())
}
