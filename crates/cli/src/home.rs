//! The places of a user's own volume, which `ramet init` makes.

use std::env::var_os;
use std::path::{Path, PathBuf};

use crate::failure::{Failure, Outcome};

/// A user's own volume and its mount point.
pub struct Home {
    /// The home directory.
    pub user: PathBuf,
    /// The image, in the data folder of the user.
    pub volume: PathBuf,
    /// The mount point.
    pub dir: PathBuf,
}

impl Home {
    /// The places for the user of this process, whether anything is there or not.
    ///
    /// # Errors
    /// The environment tells of no home.
    pub fn of_user() -> Outcome<Home> {
        let user = absolute("HOME").ok_or_else(|| {
            Failure::new("HOME is no absolute path: give a volume and a directory instead")
        })?;
        let data = absolute("XDG_DATA_HOME").unwrap_or_else(|| user.join(".local/share"));
        Ok(Home {
            volume: data.join("ramet/default.ramet"),
            dir: user.join("ramet"),
            user,
        })
    }
}

/// The mount point of the user's own volume, for commands without a directory.
pub fn dir() -> PathBuf {
    // A user without a home gets a message with this name.
    Home::of_user().map_or_else(|_| PathBuf::from("~/ramet"), |home| home.dir)
}

/// The same with a slash at its end: the directory that gets a tree under a name of its own.
pub fn inside() -> PathBuf {
    dir().join("")
}

/// The user's own volume, for commands without a volume.
pub fn volume() -> PathBuf {
    Home::of_user().map_or_else(|_| PathBuf::from("~/ramet"), |home| home.volume)
}

/// Refuses a place of the user's own volume where nothing is yet.
///
/// # Errors
/// `path` is the default of a command, and neither it nor the volume is there.
pub fn refuse_before_init(path: &Path) -> Outcome {
    let Ok(home) = Home::of_user() else {
        return Ok(());
    };
    let is_default = path == home.dir || path == home.volume;
    let is_missing = |path: &Path| matches!(path.try_exists(), Ok(false));
    if is_default && is_missing(path) && is_missing(&home.volume) {
        let why = "there is no volume of your own yet: 'ramet init' makes one";
        return Err(Failure::at(path, why));
    }
    Ok(())
}

/// A path in the environment. One that is relative or empty does not count (XDG Base Directory
/// Specification).
pub fn absolute(variable: &str) -> Option<PathBuf> {
    let path = PathBuf::from(var_os(variable)?);
    path.is_absolute().then_some(path)
}
