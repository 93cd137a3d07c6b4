//! STAND-IN for development of the upper layers only; the lead replaces this crate. Same public API as the real one.
#![forbid(unsafe_code)]
#![allow(missing_docs)]
mod batch;
mod error;
use bytes::Bytes;
use parking_lot::Mutex;
use ramet_block::Device;
use std::collections::BTreeMap;
use std::sync::Arc;
pub use batch::{Batch, Op, successor_of_prefix};
pub use error::{Error, Result};

/// Position in the history of changes: every applied batch gets the next number.
pub type Seq = u64;

/// How to make a new volume.
#[derive(Clone, Debug, Default)]
pub struct FormatOptions { pub uuid: [u8; 16], /* more later */ }
/// How to open a volume.
#[derive(Clone, Debug, Default)]
pub struct OpenOptions { pub cache_bytes: Option<u64>, pub read_only: bool }
/// Counters (real one has many more fields, all public u64, serialised by the CLI).
#[derive(Clone, Debug, Default)]
pub struct Stats { pub device_bytes: u64, pub allocated_bytes: u64, pub free_bytes: u64, pub reserved_bytes: u64, pub nodes: u64, pub segments: u64, pub leaves: u64, pub height: u64,
    pub pending_message_bytes: u64, pub checkpoint_age_ns: u64, pub journal_bytes: u64, pub cache_hits: u64, pub cache_misses: u64, pub node_reads: u64, pub poisoned: Option<String> }

type Map = BTreeMap<Bytes, Bytes>;
/// Cheap to clone handle.
#[derive(Clone)]
pub struct Tree { map: Arc<Mutex<(Arc<Map>, Seq)>> }

static REG: Mutex<Vec<(usize, Arc<Mutex<(Arc<Map>, Seq)>>)>> = Mutex::new(Vec::new());
fn key_of(d: &Arc<dyn Device>) -> usize { Arc::as_ptr(d) as *const () as usize }

impl Tree {
    pub fn format(dev: &Arc<dyn Device>, _o: &FormatOptions) -> Result<()> { let mut r = REG.lock(); r.retain(|e| e.0 != key_of(dev)); r.push((key_of(dev), Arc::default())); Ok(()) }
    /// Opens, replaying the journal. (Stand-in: any device not formatted in this process is empty.)
    pub fn open(dev: Arc<dyn Device>, _o: OpenOptions) -> Result<Tree> {
        let mut r = REG.lock();
        if let Some(e) = r.iter().find(|e| e.0 == key_of(&dev)) { return Ok(Tree { map: e.1.clone() }); }
        let m: Arc<Mutex<(Arc<Map>, Seq)>> = Arc::default(); r.push((key_of(&dev), m.clone())); std::mem::forget(dev); Ok(Tree { map: m })
    }
    pub fn get(&self, key: &[u8]) -> Result<Option<Bytes>> { self.snapshot().get(key) }
    /// Streams `[lo, hi)` in order, as of this call.
    pub fn scan(&self, lo: &[u8], hi: Option<&[u8]>) -> Scan { self.snapshot().scan(lo, hi) }
    /// A frozen view of everything applied so far; cheap; never blocks writers.
    pub fn snapshot(&self) -> Snapshot { Snapshot { map: self.map.lock().0.clone() } }
    /// Waits until there is room in memory and journal for a batch of about this many bytes. Call BEFORE taking locks that other requests need; `apply` itself then does not block on I/O.
    pub fn admit(&self, _bytes: usize) -> Result<()> { Ok(()) }
    /// Applies atomically; visible on return, durable after `sync`.
    pub fn apply(&self, b: Batch) -> Result<Seq> {
        let mut g = self.map.lock();
        let m = Arc::make_mut(&mut g.0);
        for op in b.ops { match op {
            Op::Put { key, value } => { m.insert(key, value); }
            Op::Delete { key } => { m.remove(&key); }
            Op::Patch { key, offset, bytes } => { let mut v = m.get(&key).map(|v| v.to_vec()).unwrap_or_default(); let o = offset as usize; if v.len() < o + bytes.len() { v.resize(o + bytes.len(), 0); } v[o..o + bytes.len()].copy_from_slice(&bytes); m.insert(key, v.into()); }
            Op::DeleteRange { lo, hi } => { let ks: Vec<Bytes> = rng(m, &lo, hi.as_deref()).map(|e| e.0.clone()).collect(); for k in ks { m.remove(&k); } }
            Op::CloneRange { lo, hi, strip, prefix } => {
                let s = strip as usize;
                let c: Vec<_> = rng(m, &lo, hi.as_deref()).map(|(k, v)| { let mut n = prefix.to_vec(); n.extend_from_slice(&k[s..]); (Bytes::from(n), v.clone()) }).collect();
                let p = &lo[..s];
                let mut dlo = prefix.to_vec(); dlo.extend_from_slice(&lo[s..]);
                let dhi = match &hi { Some(h) if h.starts_with(p) => { let mut d = prefix.to_vec(); d.extend_from_slice(&h[s..]); Some(Bytes::from(d)) } _ => successor_of_prefix(&prefix) };
                let ks: Vec<Bytes> = rng(m, &dlo, dhi.as_deref()).map(|e| e.0.clone()).collect(); for k in ks { m.remove(&k); }
                m.extend(c);
            }
        } }
        g.1 += 1; Ok(g.1)
    }
    /// Everything applied before this call is durable on return (group commit).
    pub fn sync(&self) -> Result<()> { Ok(()) }
    /// Everything up to and including `seq` is durable on return.
    pub fn sync_to(&self, _s: Seq) -> Result<()> { Ok(()) }
    /// Writes a checkpoint and waits for it.
    pub fn checkpoint(&self) -> Result<()> { Ok(()) }
    pub fn stats(&self) -> Stats { Stats { device_bytes: 1 << 32, free_bytes: 1 << 31, ..Stats::default() } }
    /// Checkpoints, stops the background work. Later calls fail with `Poisoned`. Dropping without it is like a crash.
    pub fn close(&self) -> Result<()> { Ok(()) }
}
fn rng<'a>(m: &'a Map, lo: &[u8], hi: Option<&[u8]>) -> Box<dyn Iterator<Item = (&'a Bytes, &'a Bytes)> + 'a> {
    use std::ops::Bound::*;
    if hi.is_some_and(|h| h <= lo) { return Box::new(std::iter::empty()); }
    Box::new(m.range::<[u8], _>((Included(lo), hi.map_or(Unbounded, Excluded))))
}
/// A frozen view. Send + Sync, cheap to clone.
#[derive(Clone)]
pub struct Snapshot { map: Arc<Map> }
impl Snapshot {
    pub fn get(&self, key: &[u8]) -> Result<Option<Bytes>> { Ok(self.map.get(key).cloned()) }
    pub fn scan(&self, lo: &[u8], hi: Option<&[u8]>) -> Scan { Scan { map: self.map.clone(), at: Bytes::copy_from_slice(lo), hi: hi.map(Bytes::copy_from_slice), first: true } }
}
/// A streaming scan in key order.
pub struct Scan { map: Arc<Map>, at: Bytes, hi: Option<Bytes>, first: bool }
impl Iterator for Scan {
    type Item = Result<(Bytes, Bytes)>;
    fn next(&mut self) -> Option<Self::Item> {
        use std::ops::Bound::*;
        if self.hi.as_ref().is_some_and(|h| *h <= self.at) { return None; }
        let lo: std::ops::Bound<&[u8]> = if self.first { Included(&self.at[..]) } else { Excluded(&self.at[..]) };
        let hi: std::ops::Bound<&[u8]> = self.hi.as_deref().map_or(Unbounded, Excluded);
        let (k, v) = self.map.range::<[u8], _>((lo, hi)).next()?; let r = (k.clone(), v.clone());
        self.first = false; self.at = r.0.clone(); Some(Ok(r))
    }
}
