//! The table of installed programs: where each one is installed, and which Debian package has it.

/// A Debian package of Sempa.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum DebianPackage {
    /// The libraries that programs load.
    Library,
    /// The programs that users and their virtual machines run.
    Programs,
    /// What programmers need to compile and link programs.
    Development,
    /// What root runs on each machine, for all users.
    Node,
    /// A CRIU for the taskers.
    Criu,
}

impl DebianPackage {
    /// All packages, in the order in which they depend on each other.
    pub const ALL: [Self; 5] = [
        Self::Library,
        Self::Programs,
        Self::Development,
        Self::Node,
        Self::Criu,
    ];

    /// Name of the package for dpkg.
    pub fn name(self) -> &'static str {
        match self {
            Self::Library => "sempa-libpvm3",
            Self::Programs => "sempa",
            Self::Development => "sempa-dev",
            Self::Node => "sempa-node",
            Self::Criu => "sempa-criu",
        }
    }
}

/// Whether an installation may lack a program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Presence {
    /// The installation fails without the program.
    Required,
    /// The program is installed if the build has made it.
    IfBuilt,
}

/// A program, its place and its package.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Program {
    pub name: &'static str,
    /// Folder below the prefix: `bin`, or `sbin` for programs that only root runs.
    pub folder: &'static str,
    pub package: DebianPackage,
    pub presence: Presence,
}

impl Program {
    const fn required(name: &'static str, package: DebianPackage) -> Self {
        Self {
            name,
            folder: "bin",
            package,
            presence: Presence::Required,
        }
    }

    const fn for_root_if_built(name: &'static str) -> Self {
        Self {
            name,
            folder: "sbin",
            package: DebianPackage::Node,
            presence: Presence::IfBuilt,
        }
    }
}

/// All installed programs. Debian's PVM has `pvm_gstat` in its development package.
pub const PROGRAMS: [Program; 9] = [
    Program::required("pvm", DebianPackage::Programs),
    Program::required("pvmd", DebianPackage::Programs),
    Program::required("pvm-rm", DebianPackage::Programs),
    Program::required("pvm-load-watcher", DebianPackage::Programs),
    Program::required("pvm-tasker", DebianPackage::Programs),
    Program::required("pvmgs", DebianPackage::Programs),
    Program::required("pvm_gstat", DebianPackage::Development),
    Program::for_root_if_built("pvm-taskerd"),
    Program::for_root_if_built("pvm-admin"),
];
