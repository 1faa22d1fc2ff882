//! Wrong and missing shared libraries of a task's program: what a user reads about them.

use serde::{Deserialize, Serialize};
use std::fmt;

/// How a program got the library of another PVM.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum LibrarySource {
    /// The process has loaded a shared library; contains its path.
    Loaded(String),
    /// The program was linked with an archive.
    Linked,
    /// The memory map of the process could not be read.
    #[default]
    Unknown,
}

/// A program that uses the library of another PVM. Its library cannot talk to Sempa's daemon, so
/// every PVM call of the program fails.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ForeignLibrary {
    /// Path of the program.
    pub program: String,
    pub source: LibrarySource,
    /// Path of Sempa's library on this host; `None` if the daemon does not know it.
    #[serde(rename = "expected")]
    pub own_library: Option<String>,
}

impl fmt::Display for ForeignLibrary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let own_library = self.own_library.as_deref().unwrap_or("libpvm3.so.3");
        let program = &self.program;
        match &self.source {
            LibrarySource::Loaded(library) => write!(
                f,
                "{program} loaded {library} instead of Sempa's {own_library}, so its PVM calls fail; a start script \
                 probably put another folder first in LD_LIBRARY_PATH: change the script, or spawn with \
                 LD_PRELOAD={own_library} and PVM_EXPORT=LD_PRELOAD in the environment of the spawner"
            ),
            LibrarySource::Linked => write!(
                f,
                "{program} was linked with the archive libpvm3.a of another PVM, so its PVM calls fail; link it again \
                 with Sempa's library"
            ),
            LibrarySource::Unknown => write!(
                f,
                "{program} uses the library of another PVM instead of Sempa's {own_library}, so its PVM calls fail; \
                 check LD_LIBRARY_PATH in its start script, and the library with which it was linked"
            ),
        }
    }
}

/// A shared library that the dynamic loader could not load. The program did not start.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LoadFailure {
    /// The library as the loader names it: its name or its path.
    pub library: String,
    /// The reason that the loader gives.
    pub why: String,
}

impl LoadFailure {
    /// Wait status of a process that the dynamic loader has ended for this reason.
    pub const WAIT_STATUS: i32 = 127 << 8;

    /// Finds the loader's message in the output of a process.
    pub fn find_in(output: &[u8]) -> Option<Self> {
        const MESSAGE: &str = ": error while loading shared libraries: ";
        // The message is one line in the same language on every system.
        output.split(|byte| *byte == b'\n').find_map(|line| {
            let line = std::str::from_utf8(line).ok()?;
            let (_, failure) = line.split_once(MESSAGE)?;
            let (library, why) = failure.split_once(": ")?;
            Some(Self {
                library: library.to_string(),
                why: why.to_string(),
            })
        })
    }
}

impl fmt::Display for LoadFailure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "the program did not start, because the library {} could not be loaded ({}): install it there, or \
             name its folder in LD_LIBRARY_PATH where the daemon of that host starts",
            self.library, self.why
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn message_of_loader_is_found() {
        let output = b"starting\n/opt/x/worker: error while loading shared libraries: libgmp.so.10: cannot open \
                       shared object file: No such file or directory\n";
        let failure = LoadFailure::find_in(output).expect("the message");
        assert_eq!(failure.library, "libgmp.so.10");
        assert_eq!(
            failure.why,
            "cannot open shared object file: No such file or directory"
        );
        let unusable = b"w: error while loading shared libraries: /lib/libx.so: file too short";
        let failure = LoadFailure::find_in(unusable).expect("the message");
        assert_eq!(
            (failure.library.as_str(), failure.why.as_str()),
            ("/lib/libx.so", "file too short")
        );
        for other in [
            &b"error while loading shared libraries"[..],
            b"w: error while loading shared libraries: libx",
            b"\xff: error while loading shared libraries: a: b",
            b"",
        ] {
            assert_eq!(LoadFailure::find_in(other), None);
        }
    }

    #[test]
    fn sentence_names_libraries_and_remedy() {
        let fault = ForeignLibrary {
            program: "/h/master1".into(),
            source: LibrarySource::Loaded("/usr/lib/libpvm3.so.3.4.6".into()),
            own_library: Some("/opt/sempa/lib/libpvm3.so.3".into()),
        };
        let text = fault.to_string();
        for part in [
            "/h/master1 loaded /usr/lib/libpvm3.so.3.4.6",
            "instead of Sempa's /opt/sempa/lib/libpvm3.so.3",
            "LD_PRELOAD=/opt/sempa/lib/libpvm3.so.3",
        ] {
            assert!(text.contains(part), "{text}");
        }
        for (source, text) in [
            (LibrarySource::Linked, "link it again"),
            (LibrarySource::Unknown, "check LD_LIBRARY_PATH"),
        ] {
            let fault = ForeignLibrary {
                source,
                ..fault.clone()
            };
            assert!(fault.to_string().contains(text), "{fault}");
        }
    }
}
