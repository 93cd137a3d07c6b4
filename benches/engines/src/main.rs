//! The tree beside RocksDB, LMDB, redb and Rodeh's B-trees. `benches/engines/run` prepares the device and calls this once for
//! each engine, then once more for the table.
//!
//! Every engine gets the same keys in the same order, in batches of the same size, and makes them durable at the
//! same points. All figures of the device come from its own counters in `/sys/block`, below the file system. Cold
//! means: closed, the kernel's pages of its files dropped, opened again. A memory limit on the whole process, page
//! cache included, is set by the script, so that nobody keeps all data in a cache that is not counted.

mod engine;
#[cfg(feature = "others")]
mod lmdb;
mod load;
mod meter;
mod ramet;
#[cfg(feature = "others")]
mod redb;
#[cfg(feature = "others")]
mod rocks;
mod rodeh;
mod table;

use std::path::PathBuf;

use clap::Parser;
use engine::{Engine, NAMES, open};
use load::{KEY_BYTES, VALUE_BYTES, border, key, mix, value};
use meter::{Cost, Meter};
use serde_json::{Map, json};

pub type Failure = Box<dyn std::error::Error + Send + Sync>;
pub type Outcome<T> = Result<T, Failure>;

#[derive(Parser)]
enum Command {
    /// Measures one engine and writes the figures as JSON.
    Measure(Measure),
    /// Prints figures of several engines as a Markdown table.
    Table {
        /// What `measure` wrote.
        files: Vec<PathBuf>,
    },
}

#[derive(clap::Args)]
pub struct Measure {
    #[arg(long, value_parser = NAMES)]
    engine: String,
    /// An empty folder on the file system of the device.
    #[arg(long)]
    dir: PathBuf,
    /// `/sys/block/NAME/stat` of that device.
    #[arg(long)]
    stat: PathBuf,
    /// Where the figures go.
    #[arg(long)]
    out: PathBuf,
    /// Keys that are inserted.
    #[arg(long, default_value_t = 1_000_000)]
    keys: u64,
    /// Keys of a batch.
    #[arg(long, default_value_t = 100)]
    batch: u64,
    /// Keys after which everything is made durable.
    #[arg(long, default_value_t = 10_000)]
    sync: u64,
    /// Bytes of the engine's own cache.
    #[arg(long, default_value_t = 256 << 20)]
    cache: usize,
    /// Ramet only: part of a leaf's size that has to wait before it is rewritten, in 1/256.
    #[arg(long)]
    theta: Option<usize>,
    /// Ramet only: bytes of the memory buffer.
    #[arg(long)]
    memory_bytes: Option<usize>,
    /// Ramet only: bytes of messages in an interior node.
    #[arg(long)]
    buffer_bytes: Option<usize>,
    /// Ramet only: segments of an interior node before they are merged.
    #[arg(long)]
    segments: Option<usize>,
    /// Ramet only: bytes of a basement node and of a block of a segment.
    #[arg(long)]
    block_bytes: Option<usize>,
    /// Stop after the inserts.
    #[arg(long)]
    load_only: bool,
}

const SCAN_LEN: usize = 100;
const PARTS: u64 = 100;

struct Bench {
    options: Measure,
    meter: Meter,
    engine: Box<dyn Engine>,
    figures: Map<String, serde_json::Value>,
}

impl Bench {
    fn run(
        &mut self,
        name: &str,
        ops: u64,
        phase: impl FnOnce(&Measure, &mut dyn Engine) -> Outcome<()>,
    ) -> Outcome<Cost> {
        let (options, engine) = (&self.options, &mut *self.engine);
        let (cost, ()) = self.meter.measure(ops, || phase(options, engine))?;
        eprintln!(
            "{:>8} {name:>20}: {:8.2} s, {:8.2} s cpu, {:>7} reads, {:8.1} MiB written",
            self.options.engine,
            cost.seconds,
            cost.cpu_seconds,
            cost.reads,
            cost.written_bytes as f64 / 1_048_576.0
        );
        self.figures.insert(name.into(), cost.json());
        Ok(cost)
    }

    /// Closes, drops the kernel's pages, opens again.
    fn chill(&mut self) -> Outcome<()> {
        let nothing: Box<dyn Engine> = Box::new(Closed);
        std::mem::replace(&mut self.engine, nothing).close()?;
        self.meter.drop_caches()?;
        self.engine = open(&self.options)?;
        Ok(())
    }

    /// Looks up `count` numbers drawn from `[0, among)`, or keys that were never inserted.
    fn gets(
        &mut self,
        name: &str,
        seed: u64,
        count: u64,
        among: u64,
        there: bool,
    ) -> Outcome<Cost> {
        self.run(name, count, |options, engine| {
            for n in 0..count {
                let number = mix(n ^ (seed << 40)) % among;
                let number = if there {
                    number
                } else {
                    options.keys + 1 + number
                };
                if engine.get(&key(number))? != there {
                    return Err(format!("key {number}: expected to be there: {there}").into());
                }
            }
            Ok(())
        })
    }

    fn scans(&mut self, name: &str, seed: u64, count: u64) -> Outcome<Cost> {
        self.run(name, count, |options, engine| {
            for n in 0..count {
                engine.scan(&key(mix(n ^ (seed << 40)) % options.keys), SCAN_LEN)?;
            }
            Ok(())
        })
    }

    fn scan_all(&mut self, name: &str, expected: Option<u64>) -> Outcome<()> {
        let mut found = 0;
        let mut digest = 0;
        self.run(name, self.options.keys, |_, engine| {
            let (count, sum) = engine.scan(&[0], usize::MAX)?;
            (found, digest) = (count as u64, sum);
            Ok(())
        })?;
        if expected.is_some_and(|expected| expected != found) {
            return Err(format!("the scan found {found} keys, not {expected:?}").into());
        }
        self.figures.insert(
            format!("{name}_found"),
            json!({ "keys": found, "digest": format!("{digest:016x}") }),
        );
        Ok(())
    }

    fn load(&mut self) -> Outcome<()> {
        let keys = self.options.keys;
        let mut written = self
            .run("insert", keys, |options, engine| {
                let mut batch = Vec::with_capacity(usize::try_from(options.batch)?);
                for number in 0..keys {
                    batch.push((key(number), value(number)));
                    if batch.len() as u64 == options.batch || number + 1 == keys {
                        engine.insert(&batch)?;
                        batch.clear();
                    }
                    if (number + 1) % options.sync == 0 {
                        engine.sync()?;
                    }
                }
                engine.sync()
            })?
            .written_bytes;
        written += self
            .run("settle", 0, |_, engine| engine.settle())?
            .written_bytes;
        let (cost, ()) = self.meter.measure(0, || Ok(self.meter.settle_device()?))?;
        written += cost.written_bytes;
        let user = keys * (KEY_BYTES + VALUE_BYTES) as u64;
        let space = self.meter.space_bytes()?;
        self.figures.insert("written_bytes".into(), json!(written));
        self.figures.insert("user_bytes".into(), json!(user));
        self.figures.insert("space_bytes".into(), json!(space));
        eprintln!(
            "{:>8} write amplification {:.2}, space amplification {:.2}",
            self.options.engine,
            written as f64 / user as f64,
            space as f64 / user as f64
        );
        Ok(())
    }

    fn read(&mut self) -> Outcome<()> {
        let keys = self.options.keys;
        let many = (keys / 50).clamp(1_000, 200_000);
        let some = (keys / 500).clamp(500, 20_000);
        let (warm, cold) = (1, 2);
        self.gets("get_hot_warmup", warm, 1_000, 1_000, true)?;
        self.gets("get_hot", warm, many, 1_000, true)?;
        self.gets("get_uniform", warm, many, keys, true)?;
        self.gets("get_missing", warm, many, keys, false)?;
        self.scans("scan_100", warm, some)?;
        self.scan_all("scan_all", Some(keys))?;
        self.chill()?;
        self.gets("get_cold_first", cold, some, keys, true)?;
        self.gets("get_cold_next", cold + 1, some, keys, true)?;
        self.gets("get_cold_missing", cold + 2, some, keys, false)?;
        self.chill()?;
        self.scans("scan_100_cold", cold, some / 10)?;
        self.chill()?;
        self.scan_all("scan_all_cold", Some(keys))
    }

    fn change(&mut self) -> Outcome<()> {
        // A part in 256 of the table, which the others copy key by key.
        self.run("clone_part", 1, |_, engine| {
            engine.clone_prefix(b"a\x80", b"c1")?;
            engine.sync()
        })?;
        if ["ramet", "rodeh"].contains(&&*self.options.engine) {
            self.run("clone_all", 1, |_, engine| {
                engine.clone_prefix(b"a", b"d")?;
                engine.sync()
            })?;
            self.run("clone_part_settle", 0, |_, engine| engine.settle())?;
            self.run("drop_clone", 1, |_, engine| {
                engine.delete_range(b"d", b"e")?;
                engine.sync()
            })?;
        }
        // Every tenth part of a hundred: a tenth of the table.
        self.run("delete_ranges", PARTS / 10, |_, engine| {
            for part in (0..PARTS).step_by(10) {
                engine.delete_range(&border(part, PARTS), &border(part + 1, PARTS))?;
            }
            engine.sync()
        })?;
        self.run("delete_settle", 0, |_, engine| engine.settle())?;
        self.scan_all("scan_after", None)
    }
}

/// Stands in while nothing is open.
struct Closed;

impl Engine for Closed {
    fn insert(&mut self, _: &[(load::Key, load::Value)]) -> Outcome<()> {
        Err("closed".into())
    }
    fn sync(&mut self) -> Outcome<()> {
        Err("closed".into())
    }
    fn get(&self, _: &[u8]) -> Outcome<bool> {
        Err("closed".into())
    }
    fn scan(&self, _: &[u8], _: usize) -> Outcome<(usize, u64)> {
        Err("closed".into())
    }
    fn delete_range(&mut self, _: &[u8], _: &[u8]) -> Outcome<()> {
        Err("closed".into())
    }
    fn clone_prefix(&mut self, _: &[u8], _: &[u8]) -> Outcome<()> {
        Err("closed".into())
    }
    fn settle(&mut self) -> Outcome<()> {
        Err("closed".into())
    }
    fn close(self: Box<Self>) -> Outcome<()> {
        Ok(())
    }
}

fn main() -> Outcome<()> {
    match Command::parse() {
        Command::Table { files } => table::print(&files),
        Command::Measure(options) => {
            let mut bench = Bench {
                meter: Meter::new(&options.dir, &options.stat),
                engine: open(&options)?,
                figures: Map::new(),
                options,
            };
            let o = &bench.options;
            let settings = json!({
                "engine": o.engine, "keys": o.keys, "batch": o.batch, "sync": o.sync, "cache": o.cache,
            });
            bench.figures.insert("settings".into(), settings);
            bench.load()?;
            if !bench.options.load_only {
                bench.read()?;
                bench.change()?;
            }
            let Bench {
                engine,
                options,
                figures,
                ..
            } = bench;
            engine.close()?;
            std::fs::write(&options.out, serde_json::to_string_pretty(&figures)?)?;
            Ok(())
        }
    }
}
