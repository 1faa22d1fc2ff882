//! The operating system as the machines of the simulation see it.

use crate::World;
use sempa_proto::{Micros, PvmError};
use std::path::PathBuf;

#[derive(Debug)]
pub(super) struct FakeWorld {
    pub(super) secret: i32,
    pub(super) unix_time: Micros,
    /// Name of a program that cannot be found. A program whose name contains `missing` can never be
    /// found.
    pub(super) missing_program: Option<&'static str>,
}

impl World for FakeWorld {
    fn find_program(&self, name: &str, _dir: Option<&str>) -> Result<PathBuf, PvmError> {
        if name.contains("missing") || self.missing_program == Some(name) {
            Err(PvmError::NoFile)
        } else {
            Ok(PathBuf::from(format!("/bin/{name}")))
        }
    }
    fn work_dir(&self, dir: Option<&str>) -> PathBuf {
        PathBuf::from(dir.unwrap_or("/home"))
    }
    fn base_environment(&self) -> Vec<Vec<u8>> {
        vec![b"HOME=/home".to_vec(), b"PVMEPID=7".to_vec()]
    }
    fn unix_time(&self) -> Micros {
        self.unix_time
    }
    fn random_secret(&mut self) -> i32 {
        self.secret += 1;
        self.secret
    }
}
