//! What may be in place of a directory or a file of ours, and what happens to files while they are open.

use super::*;
use rustix::fs::{CWD, FileType, Mode, mknodat};
use std::ffi::OsStr;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown, symlink};
use std::path::Path;

/// A directory in which something is kept.
struct Kept {
    place: Place,
    pages: Vec<(u32, u64)>,
}

impl Kept {
    fn new() -> Self {
        let place = Place::new();
        let pages: Vec<_> = blocks(LARGE)[..8].iter().map(|&block| (block, 500 + u64::from(block))).collect();
        let (store, _) = open(&Folder::open(&place.0).unwrap()).unwrap();
        write(&mut store.lane().unwrap(), LARGE, &pages).unwrap();
        let places: Vec<_> = pages.iter().map(|&(block, _)| (LARGE, BlockId::new(block))).collect();
        store.put(b"it", &places, b"").unwrap();
        Self { place, pages }
    }

    fn file(&self, name: &str) -> PathBuf {
        self.place.0.join(name)
    }

    fn open(&self) -> Arc<Store> {
        open(&Folder::open(&self.place.0).unwrap()).unwrap().0
    }

    fn refusal(&self) -> String {
        refusal(&self.place.0)
    }

    /// How many of its pages can be read, all of them right. The others must be corrupt, not fail for another reason.
    fn readable(&self, store: &Arc<Store>) -> usize {
        let mut lane = store.lane().unwrap();
        let results = self.pages.iter().map(|&page| read(&mut lane, LARGE, &[page], layers(LARGE)));
        let right = |result: Result<()>| match result {
            Ok(()) => true,
            Err(Error::Corrupt { .. }) => false,
            Err(other) => panic!("{other}"),
        };
        results.map(right).filter(|&right| right).count()
    }
}

fn refusal(path: &Path) -> String {
    Folder::open(path).and_then(|folder| open(&folder)).unwrap_err().to_string()
}

#[test]
fn what_is_no_file_is_refused_at_once() {
    let kept = Kept::new();
    for name in ["pages", "index"] {
        let (file, aside) = (kept.file(name), kept.file("aside"));
        fs::rename(&file, &aside).unwrap();
        for (kind, reason) in [(FileType::Fifo, "not a file"), (FileType::Socket, "No such device")] {
            mknodat(CWD, &file, kind, Mode::RUSR | Mode::WUSR, 0).unwrap();
            assert!(kept.refusal().contains(reason), "{}", kept.refusal());
            fs::remove_file(&file).unwrap();
        }
        fs::create_dir(&file).unwrap();
        fs::set_permissions(&file, std::os::unix::fs::PermissionsExt::from_mode(0o700)).unwrap();
        let reason = kept.refusal();
        assert!(reason.contains("Is a directory") || reason.contains("not a file"), "{reason}");
        fs::remove_dir(&file).unwrap();
        fs::rename(&aside, &file).unwrap();
    }
    assert_eq!(kept.readable(&kept.open()), 8);
}

#[test]
fn pages_whose_index_is_gone_are_refused_and_left_alone() {
    let kept = Kept::new();
    let (index, aside) = (kept.file("index"), kept.file("aside"));
    fs::rename(&index, &aside).unwrap();
    assert!(kept.refusal().contains("it is gone, and"), "{}", kept.refusal());
    fs::rename(&aside, &index).unwrap();
    assert_eq!(kept.readable(&kept.open()), 8);
    // As a process that is killed right away leaves it.
    fs::remove_file(&index).unwrap();
    fs::write(kept.file("pages"), b"").unwrap();
    kept.open();
}

#[test]
fn nothing_is_said_to_be_kept_in_files_that_were_removed() {
    for name in ["pages", "index"] {
        let kept = Kept::new();
        let store = kept.open();
        fs::remove_file(kept.file(name)).unwrap();
        let refused = store.put(b"more", &[(LARGE, BlockId::new(kept.pages[0].0))], b"").unwrap_err();
        assert!(refused.to_string().contains("has removed the file"), "{refused}");
    }
}

/// Its lock would keep nobody out.
#[test]
fn a_file_that_is_removed_while_its_lock_is_waited_for_is_refused() {
    let kept = Kept::new();
    let (store, folder) = (kept.open(), Folder::open(&kept.place.0).unwrap());
    let (pulse, file) = (folder.pulse(), kept.file("pages"));
    let before = pulse.answered();
    let waiting = std::thread::spawn(move || folder.lock("pages").map(drop));
    // Until it has opened the file and looked at it.
    while pulse.answered() < before + 2 {
        std::thread::yield_now();
    }
    std::fs::remove_file(file).unwrap();
    drop(store);
    let refused = waiting.join().unwrap().unwrap_err();
    assert!(refused.to_string().contains("somebody has removed the file"), "{refused}");
}

/// By then they may belong to another process.
#[test]
fn a_store_whose_files_were_removed_leaves_those_of_the_next_alone() {
    let kept = Kept::new();
    let folder = || Folder::open(&kept.place.0).unwrap();
    let budget = Budget::new(1 << 40, std::time::SystemTime::now());
    let (old, _) = Store::open(&folder(), geometry(), FINGERPRINT, Some(budget)).unwrap();
    let old = Arc::new(old);
    write(&mut old.lane().unwrap(), SMALL, &[(blocks(SMALL)[0], 1)]).unwrap();
    ["pages", "index", "written"].iter().for_each(|name| fs::remove_file(kept.file(name)).unwrap());
    let (next, _) = open(&folder()).unwrap();
    write(&mut next.lane().unwrap(), LARGE, &kept.pages[..1]).unwrap();
    next.put(b"of the next", &[(LARGE, BlockId::new(kept.pages[0].0))], b"").unwrap();
    for _ in 0..3 {
        let refused = old.delete(b"it").unwrap_err();
        assert!(refused.to_string().contains("somebody has removed the file"), "{refused}");
    }
    drop(old);
    assert!(!kept.file("written").exists());
    drop(next);
    let store = kept.open();
    assert!(store.entries().iter().map(|(key, _)| &key[..]).eq([b"of the next"]));
}

#[test]
fn what_others_own_is_refused() {
    if !rustix::process::geteuid().is_root() {
        return; // Nobody else can give files away.
    }
    let kept = Kept::new();
    for file in [kept.place.0.clone(), kept.file("pages"), kept.file("index")] {
        chown(&file, Some(12_345), None).unwrap();
        assert!(kept.refusal().contains("of user 12345: this process is 0"), "{}", kept.refusal());
        chown(&file, Some(0), None).unwrap();
    }
    assert_eq!(kept.readable(&kept.open()), 8);
}

#[test]
fn paths_that_are_none_are_refused() {
    for path in [&b""[..], b"a\0b", &[b'x'; 5000], b"/dev/null", b"/proc/self/nothing/x"] {
        let error = Folder::open(Path::new(OsStr::from_bytes(path))).unwrap_err();
        assert!(matches!(error, Error::Io { operation: "opening the directory", .. }), "{error}");
    }
}

#[test]
fn a_file_that_is_cut_short_while_it_is_open_has_lost_pages_and_no_more() {
    let kept = Kept::new();
    let store = kept.open();
    let pages = fs::File::options().write(true).open(kept.file("pages")).unwrap();
    let len = pages.metadata().unwrap().len();
    let mut counts = Vec::new();
    for part in (0..=8).rev() {
        for less in [0, 1, 4097] {
            pages.set_len((len * part / 8).saturating_sub(less)).unwrap();
            counts.push(kept.readable(&store));
        }
    }
    assert!(counts.is_sorted_by(|a, b| a >= b) && counts[0] == 8 && counts.last() == Some(&0), "{counts:?}");
    assert_eq!(kept.readable(&kept_after(store, &kept)), 0, "nor are they there for the next process");

    let store = kept.open();
    store.delete(b"it").unwrap();
    write(&mut store.lane().unwrap(), LARGE, &kept.pages).unwrap();
    assert_eq!(kept.readable(&store), 8, "what is written from now on is there");
}

/// The store as the next process has it.
fn kept_after(store: Arc<Store>, kept: &Kept) -> Arc<Store> {
    drop(store);
    kept.open()
}

#[test]
fn files_that_grow_while_they_are_open_are_read_to_where_they_were_written() {
    let kept = Kept::new();
    let store = kept.open();
    for name in ["pages", "index"] {
        let mut file = fs::File::options().append(true).open(kept.file(name)).unwrap();
        std::io::Write::write_all(&mut file, &[0x5a; 10_000]).unwrap();
    }
    assert_eq!(kept.readable(&store), 8);
    store.put(b"more", &[(LARGE, BlockId::new(kept.pages[0].0))], b"meta").unwrap();
    let store = kept_after(store, &kept);
    assert_eq!(kept.readable(&store), 8);
    let keys: Vec<_> = store.entries().into_iter().map(|(key, _)| key).collect();
    assert_eq!(keys, [b"it".to_vec(), b"more".to_vec()]);
}

/// No file of ext4 has more than 16 TiB. That is no reason to refuse its directory, or to leave behind what nobody keeps.
#[test]
fn a_disk_memory_beyond_what_the_file_system_takes_is_as_good_as_any() {
    let place = Place::new();
    let geometry = Geometry::new(&[vec![4 << 20]], 20 << 40).unwrap();
    let opened = || {
        let folder = Folder::open(&place.0).unwrap();
        Arc::new(Store::open(&folder, geometry.clone(), FINGERPRINT, None).unwrap().0)
    };
    let taken = || fs::metadata(place.0.join("pages")).unwrap().blocks();
    let store = opened();
    store.lane().unwrap().write(LARGE, &[BlockId::new(0)], |_, _, target| target.fill(7)).unwrap();
    assert!(taken() > 0);
    drop(store);
    let store = opened();
    assert!(taken() == 0 || cfg!(not(target_os = "linux")), "holes are of Linux");
    store.zero_on_free().unwrap();
}

#[test]
fn hostile_places_are_refused() {
    let place = Place::new();
    let path = |name: &str| place.0.join(name);
    let refused = |name: &str| {
        let folder = Folder::open(&path(name));
        let error = folder.and_then(|folder| open(&folder)).unwrap_err();
        error.to_string()
    };
    let rights =
        |name: &str, mode| std::fs::set_permissions(path(name), PermissionsExt::from_mode(mode)).unwrap();
    std::fs::create_dir(&place.0).unwrap();
    assert!(refused("no/such").contains("No such file"));
    std::fs::write(path("file"), b"").unwrap();
    assert!(refused("file").contains("Not a directory"));
    mknodat(CWD, path("fifo"), FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();
    assert!(refused("fifo").contains("Not a directory"), "at once");
    open(&Folder::open(&path("good")).unwrap()).unwrap();
    assert_eq!(std::fs::metadata(path("good")).unwrap().permissions().mode() & 0o777, 0o700);
    for name in ["pages", "index"] {
        let mode = std::fs::metadata(path("good").join(name)).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600, "{name}");
    }
    symlink(path("good"), path("link")).unwrap();
    assert!(refused("link").contains("a link"));
    for (mode, shown) in [(0o770, "mode 770"), (0o720, "mode 720"), (0o702, "mode 702")] {
        rights("good", mode);
        assert!(refused("good").contains(shown));
    }
    rights("good", 0o755);
    open(&Folder::open(&path("good")).unwrap()).unwrap();
    for name in ["good/pages", "good/index"] {
        for (mode, shown) in [(0o640, "mode 640"), (0o604, "mode 604")] {
            rights(name, mode);
            assert!(refused("good").contains(shown));
        }
        rights(name, 0o600);
        std::fs::rename(path(name), path("aside")).unwrap();
        symlink(path("aside"), path(name)).unwrap();
        assert!(refused("good").contains("symbolic links"));
        std::fs::remove_file(path(name)).unwrap();
        std::fs::hard_link(path("aside"), path(name)).unwrap();
        assert!(refused("good").contains("2 names"));
        std::fs::remove_file(path("aside")).unwrap();
        open(&Folder::open(&path("good")).unwrap()).unwrap();
    }
    std::fs::remove_file(path("good/index")).unwrap();
    std::fs::create_dir(path("good/index")).unwrap();
    rights("good/index", 0o700);
    assert!(refused("good").contains("not a file"));
}
