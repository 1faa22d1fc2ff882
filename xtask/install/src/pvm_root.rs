//! Installs what make files, configure scripts and `aimk` expect below `PVM_ROOT`, so that the
//! prefix can be `PVM_ROOT`.

use crate::project_folder;
use crate::replace::{install_file, replace_link};
use anyhow::{Context, Result};
use std::fs;
use std::path::Path;

/// PVM's name of the only architecture on which Sempa runs, the value of `PVM_ARCH`.
const ARCH: &str = "LINUX64";

/// Names of the scripts in `PVM_ROOT/lib`.
const SCRIPTS: [&str; 3] = ["aimk", "pvmgetarch", "pvmtmparch"];

/// Scripts that Debian's PVM also has in PATH.
const SCRIPTS_IN_PATH: [&str; 2] = ["aimk", "pvmgetarch"];

/// Links below the prefix, as (path, target). PVM keeps programs and archives of each architecture
/// in `PVM_ROOT/lib/PVM_ARCH`.
///
/// This folder has no shared libraries, as in PVM: a program that is linked with an archive runs
/// without `LD_LIBRARY_PATH`, and no other `libpvm3.so.3` of the machine can take the library's
/// place.
const LINKS: [(&str, &str); 11] = [
    ("lib/pvm", "../bin/pvm"),
    ("lib/pvmd", "../bin/pvmd"),
    ("lib/pvmgs", "../bin/pvmgs"),
    ("lib/LINUX64/pvm", "../../bin/pvm"),
    ("lib/LINUX64/pvmd3", "../../bin/pvmd"),
    ("lib/LINUX64/pvmgs", "../../bin/pvmgs"),
    ("lib/LINUX64/libpvm3.a", "../libpvm3.a"),
    ("lib/LINUX64/libgpvm3.a", "../libgpvm3.a"),
    ("lib/LINUX64/libfpvm3.a", "../libfpvm3.a"),
    ("lib/LINUX64/libsempa_work.a", "../libsempa_work.a"),
    ("lib/LINUX64/libsempa_broker.a", "../libsempa_broker.a"),
];

/// Installs the scripts and definitions of `libpvm/pvm-root`, and links to the installed programs
/// and archives.
///
/// # Errors
/// The prefix cannot be written.
pub(crate) fn install_pvm_root(prefix: &Path) -> Result<()> {
    let source_folder = project_folder().join("libpvm/pvm-root");
    for folder in [
        "conf".to_string(),
        format!("lib/{ARCH}"),
        format!("bin/{ARCH}"),
    ] {
        let folder = prefix.join(folder);
        fs::create_dir_all(&folder).with_context(|| format!("cannot make {}", folder.display()))?;
    }
    for script in SCRIPTS {
        let path = Path::new("lib").join(script);
        install_file(&source_folder.join(&path), &prefix.join(&path), 0o755)?;
    }
    for ending in ["def", "m4"] {
        let path = Path::new("conf").join(format!("{ARCH}.{ending}"));
        install_file(&source_folder.join(&path), &prefix.join(&path), 0o644)?;
    }
    for script in SCRIPTS_IN_PATH {
        replace_link(
            &format!("../lib/{script}"),
            &prefix.join("bin").join(script),
        )?;
    }
    for (path, target) in LINKS {
        replace_link(target, &prefix.join(path))?;
    }
    Ok(())
}
