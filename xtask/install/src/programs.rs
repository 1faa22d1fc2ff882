//! The table of installed programs: where each one is installed, and which Debian package has it.

/// A Debian package of Sempa.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum DebianPackage {
    /// The libraries that PVM programs load.
    Library,
    /// The library of master-worker programs.
    WorkLibrary,
    /// The library of members of a broker session.
    BrokerLibrary,
    /// The programs that users and their virtual machines run.
    Programs,
    /// What programmers need to compile and link programs.
    Development,
    /// What root runs on each machine, for all users.
    Node,
    /// The module sempa_pvm for the Python of the distribution.
    Python,
    /// A CRIU for the taskers.
    Criu,
}

impl DebianPackage {
    /// All packages, in the order in which they depend on each other.
    pub const ALL: [Self; 8] = [
        Self::Library,
        Self::WorkLibrary,
        Self::BrokerLibrary,
        Self::Programs,
        Self::Development,
        Self::Node,
        Self::Python,
        Self::Criu,
    ];

    /// Name of the package for dpkg.
    pub fn name(self) -> &'static str {
        match self {
            Self::Library => "sempa-libpvm3",
            Self::WorkLibrary => "libsempa-work1",
            Self::BrokerLibrary => "libsempa-broker1",
            Self::Programs => "sempa",
            Self::Development => "sempa-dev",
            Self::Node => "sempa-node",
            Self::Python => "python3-sempa-pvm",
            Self::Criu => "sempa-criu",
        }
    }
}

/// A program, its place and its package.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Program {
    pub name: &'static str,
    /// Folder below the prefix: `bin`, or `sbin` for programs that only root runs.
    pub folder: &'static str,
    pub package: DebianPackage,
}

impl Program {
    const fn for_users(name: &'static str, package: DebianPackage) -> Self {
        Self {
            name,
            folder: "bin",
            package,
        }
    }

    const fn for_root(name: &'static str) -> Self {
        Self {
            name,
            folder: "sbin",
            package: DebianPackage::Node,
        }
    }
}

/// All installed programs. Debian's PVM has `pvm_gstat` in its development package.
pub const PROGRAMS: [Program; 10] = [
    Program::for_users("pvm", DebianPackage::Programs),
    Program::for_users("pvmd", DebianPackage::Programs),
    Program::for_users("pvm-rm", DebianPackage::Programs),
    Program::for_users("pvm-load-watcher", DebianPackage::Programs),
    Program::for_users("pvm-tasker", DebianPackage::Programs),
    Program::for_users("pvmgs", DebianPackage::Programs),
    Program::for_users("pvm-broker", DebianPackage::Programs),
    Program::for_users("pvm_gstat", DebianPackage::Development),
    Program::for_root("pvm-taskerd"),
    Program::for_root("pvm-admin"),
];
