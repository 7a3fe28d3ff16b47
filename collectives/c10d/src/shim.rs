//! c10d as Rust sees it, through `cxx/`.

#[cxx::bridge(namespace = "drivetrain")]
#[allow(unreachable_pub, clippy::missing_safety_doc)]
pub(crate) mod ffi {
    unsafe extern "C++" {
        include!("store.h");
        type Store;
        fn tcp_store(
            host: &str,
            port: u16,
            serve: bool,
            timeout_ms: i64,
        ) -> Result<UniquePtr<Store>>;
        fn port(self: &Store) -> u16;
        fn set(self: &Store, key: &str, value: &[u8]) -> Result<()>;
        /// Waits for the key; ask [`has`] first.
        fn get(self: &Store, key: &str) -> Result<Vec<u8>>;
        fn add(self: &Store, key: &str, amount: i64) -> Result<i64>;
        fn has(self: &Store, key: &str) -> Result<bool>;

        include!("gloo.h");
        type Group;
        type Message;
        fn connect_gloo(
            store: &Store,
            prefix: &str,
            rank: i32,
            size: i32,
            timeout_ms: i64,
            interface: &str,
        ) -> Result<SharedPtr<Group>>;
        unsafe fn send(
            self: &Group,
            data: *const u8,
            size: usize,
            to: i32,
            tag: i32,
        ) -> Result<SharedPtr<Message>>;
        unsafe fn receive(
            self: &Group,
            data: *mut u8,
            size: usize,
            from: i32,
            tag: i32,
        ) -> Result<SharedPtr<Message>>;
        fn wait(self: &Message, timeout_ms: i64) -> Result<bool>;
        fn abort(self: &Message) -> Result<()>;
    }
}

// SAFETY: c10d's TCPStore takes a lock for every operation.
unsafe impl Send for ffi::Store {}
// SAFETY: as above.
unsafe impl Sync for ffi::Store {}
// SAFETY: gloo's contexts take messages from any thread: their pairs and buffers are behind locks.
unsafe impl Send for ffi::Group {}
// SAFETY: as above.
unsafe impl Sync for ffi::Group {}
// SAFETY: a message is waited for on one thread and aborted from another, for which gloo's buffers have a lock.
unsafe impl Send for ffi::Message {}
// SAFETY: as above.
unsafe impl Sync for ffi::Message {}
