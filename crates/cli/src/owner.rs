//! Taking a volume to write to it, with a word when that takes long.

use std::path::Path;
use std::sync::Arc;

use ramet_block::owner::{Contents, own};
use ramet_block::{ClaimError, Device, OwnedDevice};

use crate::failure::{Failure, Outcome};
use crate::output;

/// Makes the volume on `device` this process's own. `note` is told, before a wait, what for.
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

/// Says a note of a command that the user waits for.
pub fn tell(note: &str) {
    output::complain(note);
}
