//! Free space in memory: the allocator, and room of the host below a sparse device.

mod backing;
mod bare;
mod holes;
mod map;
#[cfg(test)]
mod tests;
mod windows;

pub(crate) use backing::BackedSpace;
pub(crate) use windows::Purpose;
