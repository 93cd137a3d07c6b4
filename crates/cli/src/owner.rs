//! Becoming the owner of a volume before writing to it, with a note when that takes long.

use std::path::Path;
use std::sync::Arc;

use ramet_block::owner::{Contents, own};
use ramet_block::{ClaimError, Device, OwnedDevice};

use crate::failure::{Failure, Outcome};
use crate::output;

/// Makes this process the owner of the volume on `device`. Before a wait, `note` gets the reason.
pub fn take(
    path: &Path,
    device: Arc<dyn Device>,
    contents: Contents,
    note: &mut dyn FnMut(&str),
) -> Outcome<Arc<OwnedDevice>> {
    let owned = own(device, contents, &mut |why| {
        note(&format!("{}: {why}", path.display()));
    });
    owned.map(Arc::new).map_err(|error| match error {
        ClaimError::InUse(by) => Failure::at(path, format!("already mounted, or in use by {by}")),
        ClaimError::Io(source) => Failure::system(path, source),
        error @ ClaimError::Superblock(_) => Failure::at(path, error),
    })
}

/// Shows a note of a command that the user waits for.
pub fn tell(note: &str) {
    output::complain(note);
}
