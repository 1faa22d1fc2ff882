//! The file in which CRIU notes what the kernel can do. It is CRIU's own and any user of CRIU on the host may have made
//! it, but a virtual machine must not leave it behind where it was not before.

use std::path::PathBuf;

/// Where CRIU puts its notes when `/run` is in memory.
const PATH: &str = "/run/criu.kdat";

/// Removes the notes when dropped, if they were not there when it was made.
#[derive(Debug)]
pub struct KernelNotes {
    ours: Option<PathBuf>,
}

impl KernelNotes {
    /// Looks whether the notes are there.
    pub fn look() -> KernelNotes {
        KernelNotes::at(PathBuf::from(PATH))
    }

    fn at(path: PathBuf) -> KernelNotes {
        KernelNotes {
            ours: (!path.exists()).then_some(path),
        }
    }
}

impl Drop for KernelNotes {
    fn drop(&mut self) {
        if let Some(path) = &self.ours {
            // Not there, or not ours to remove: either way nothing of ours is left.
            let _ = std::fs::remove_file(path);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn notes_that_were_there_before_stay_and_new_ones_go() {
        let path = std::env::temp_dir().join(format!("criu-notes-{}", std::process::id()));
        let notes = KernelNotes::at(path.clone());
        std::fs::write(&path, "x").expect("writable");
        drop(notes);
        assert!(!path.exists());
        std::fs::write(&path, "x").expect("writable");
        drop(KernelNotes::at(path.clone()));
        assert!(path.exists());
        std::fs::remove_file(&path).expect("removable");
    }
}
